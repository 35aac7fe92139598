"""Sample through LoRA adapters of one base: a batch whose rows go through different ones.

PEFT can read such a batch too (``adapter_names``). It picks each adapter's rows out of the batch in every layer, which
takes many small operations. Here a layer multiplies with the matrices of all adapters side by side, and a mask keeps
of each row what its own adapter gives. That is two products a layer, whatever the number of adapters.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from trl_ext.models.adapters import adapter_parameters, shaken, switches_restored
from trl_ext.models.forward import base_of
from trl_ext.models.randomness import evaluating


def matrices(model: PeftModel, adapter: str) -> list[Any] | None:
    """Return the layers of an adapter that is a LoRA of linear layers and nothing else, or None if it is anything else.

    DoRA and other variants, embeddings, trained tokens, biases, parameters of experts and fully trained modules are
    more than the two matrices of a linear layer.
    """
    layers = _layers(model, adapter)
    halves = [half for layer in layers for half in (layer.lora_A[adapter], layer.lora_B[adapter])]
    if not all(isinstance(half, nn.Linear) and half.bias is None for half in halves):
        return None
    if not all(
        isinstance(layer.base_layer, nn.Linear | Conv1D) and not layer.lora_variant.get(adapter) for layer in layers
    ):
        return None
    ids = {id(half.weight) for half in halves}
    return layers if ids and ids == {id(p) for p in adapter_parameters(model, adapter).values()} else None


def _layers(model: PeftModel, adapter: str) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer) and adapter in m.lora_A]


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The fields of configurations that say how many experts a layer has."""


def mixes(model: Any, adapter: str | None) -> bool:
    """Return whether rows of ``adapter`` can stand beside rows of other adapters in one batch.

    It must be a LoRA of linear layers below the output head. The head reads the trained tokens of all rows as one row,
    and an expert reads some tokens of all rows. Neither can know whose a token is. What both ways compute is compared
    once.
    """
    if not isinstance(model, PeftModel) or adapter is None or (layers := matrices(model, adapter)) is None:
        return False
    base: Any = model.get_base_model()
    if any(getattr(base.config.get_text_config(), name, None) for name in EXPERTS):
        return False
    if any(layer is base.get_output_embeddings() for layer in layers):
        return False

    answers = _known.setdefault(model, {})
    key = (adapter, _rounded(model))
    if key not in answers:
        answers[key] = _agrees(model, adapter)
    return answers[key]


class _Rows:
    """Which adapter each row of a batch has."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names, self.device = names, device
        self.chosen: list[int] = []
        self.masks: dict[tuple, Tensor] = {}
        self.alone = False
        """Whether there is one adapter, and every row goes through it. No mask is needed then."""

    def choose(self, adapters: Sequence[str | None]) -> None:
        """Take the adapter of each row, [B]. None is the base alone."""
        chosen = [len(self.names) if adapter is None else self.names.index(adapter) for adapter in adapters]
        if chosen != self.chosen:
            self.chosen, self.masks = chosen, {}
            self.alone = set(chosen) == {0} and len(self.names) == 1

    def mask(self, parts: tuple[tuple[int, float], ...]) -> Tensor:
        """Return [B, 1, R]: the scale of each row's adapter in that adapter's columns, and 0 in those of others.

        ``parts`` are the rank and the scale of each adapter. They are the same in most layers.
        """
        if parts not in self.masks:
            scales = torch.block_diag(*[torch.full((1, rank), scale) for rank, scale in parts])
            scales = torch.cat([scales, torch.zeros(1, scales.shape[1])])  # the base alone
            self.masks[parts] = scales[self.chosen].unsqueeze(1).to(self.device)
        return self.masks[parts]


@contextmanager
def mixed(model: PeftModel, adapters: Collection[str]) -> Iterator[Callable[[Sequence[str | None]], None]]:
    """Let the base of ``model`` read rows of several ``adapters``, for which :func:`mixes` holds.

    This yields a function that takes the adapter of each row, [B]. It is called before the base reads other rows. The
    matrices are put side by side once, at the beginning, with gradients if these are on. Dropout is left out.
    """
    names = sorted(set(adapters))
    layers = [m for m in model.modules() if isinstance(m, LoraLayer) and not m.lora_A.keys().isdisjoint(names)]
    rows = _Rows(names, next(model.parameters()).device)
    hooked = [(vars(layer), vars(layer).get("forward")) for layer in layers]  # a hook of accelerate is such a forward
    try:
        for layer in layers:
            layer.forward = _forward(layer, rows)  # type: ignore[method-assign, assignment]
        yield rows.choose
    finally:
        for attributes, forward in hooked:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def _forward(layer: Any, rows: _Rows) -> Callable[..., Tensor]:
    """Return a forward of ``layer`` in which each row goes through its own adapter."""
    names = [name for name in rows.names if name in layer.lora_A]
    down = torch.cat([layer.lora_A[name].weight for name in names])
    up = torch.cat([layer.lora_B[name].weight for name in names], 1).T.contiguous()
    parts = tuple((layer.r[n], layer.scaling[n]) if n in names else (0, 0.0) for n in rows.names)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = layer.base_layer(x, *args, **kwargs)
        inner, scale = linear(x.to(down.dtype), down), parts[0][1]
        if not rows.alone:
            inner, scale = inner * rows.mask(parts).to(down.dtype), 1.0
        if result.dtype != up.dtype:
            return result + scale * (inner @ up).to(result.dtype)
        # the product and the sum in one operation: there are hundreds of layers, and a token has little work for each
        return torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), up, alpha=scale).view_as(result)

    return forward


# -- comparison with the plain way, once for each adapter, before anything is sampled in a batch ----------------------

_MOST_TOKENS = 12
_EXACT, _ROUNDED = 1e-3, 0.2
"""The largest difference of logits, as a share of what the adapter changes in them, in float32 and in half precision.
"""

_known: WeakKeyDictionary = WeakKeyDictionary()


def _rounded(model: PeftModel) -> bool:
    """Return whether forwards are rounded to half precision now."""
    device = next(model.parameters()).device.type
    return base_of(model).dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(device)


@torch.no_grad()
def _agrees(model: PeftModel, adapter: str) -> bool:
    """Return whether a batch gives the logits that ``model`` gives with the adapter of each row switched on.

    A new adapter changes nothing, so both are asked with noise on its weights, which are restored exactly.
    """
    base = base_of(model)
    device = next(base.parameters()).device
    if device.type == "meta":
        return False
    size = base.config.get_text_config().vocab_size
    ids = torch.linspace(0, size - 1, min(size, _MOST_TOKENS), device=device).long()[None]
    rows = [adapter, None, adapter]  # what belongs to a row must not depend on the rows beside it
    with switches_restored(model), evaluating(model), shaken(model, [adapter]):
        model.set_adapter(adapter)
        adapted = base(input_ids=ids).logits[0].float()
        with model.disable_adapter():
            plain = base(input_ids=ids).logits[0].float()
        try:
            with mixed(model, [adapter]) as choose:
                choose(rows)
                found = base(input_ids=ids.expand(len(rows), -1)).logits.float()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False  # this model cannot be read that way
    gap = float((torch.stack([adapted, plain, adapted]) - found).abs().max())
    return gap <= (_ROUNDED if _rounded(model) else _EXACT) * float((adapted - plain).abs().max())
