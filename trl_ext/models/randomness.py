"""Take all randomness out of a model's forward, because the ratio of two forwards must come from the weights alone.

Dropout, layer drop, router jitter and noise on embeddings act in training mode. So models stay in evaluation mode while
they are trained. Only what recomputes activations in the backward pass needs training mode, and it gets it for itself
alone. Transformers 5.23 calls it activation checkpointing and warns at each use of the old names, gradient
checkpointing.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

DROPOUT, RANDOM = re.compile("drop"), re.compile("drop|jitter|noise")
"""What the names of probabilities of dropout, and of these and amounts of noise, have in common, in modules and
configurations.

Some routers of experts compare with their amount of jitter in evaluation mode too, so that it is a part of the model
there.
"""


def quiet(model: nn.Module) -> None:
    """Turn off all randomness in the forward of a model, and leave on the recomputation of activations.

    Every module is put into evaluation mode, except those that recompute activations, which transformers does in
    training mode only. Their amounts of noise become 0, and all probabilities of dropout, whatever they are called. The
    configuration that is saved with the model keeps its values.
    """
    model.eval()
    quieted: dict[int, Any] = {}
    for module in model.modules():
        module.training = bool(getattr(module, "gradient_checkpointing", False))
        acts = RANDOM if module.training else DROPOUT
        for name, value in list(vars(module).items()):
            if acts.search(name) and type(value) is float and value:
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # some have a whole number, 1
        config = vars(module).get("config")
        if (
            module.training
            and config is not None
            and not isinstance(module, PreTrainedModel)
            and _random_options(config)
        ):
            # some layers read their configuration in every forward
            module.config = quieted.setdefault(id(config), _quiet_config(config))


def _random_options(config: Any) -> list[str]:
    return [name for name, value in vars(config).items() if RANDOM.search(name) and type(value) is float and value]


def _quiet_config(config: Any) -> Any:
    copied = copy.deepcopy(config)
    for name in _random_options(config):
        setattr(copied, name, 0.0)
    return copied


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and give every module its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def first_difference(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Return the name of the first module whose output differs between two calls of ``forward``, or None.

    A module counts before the modules that hold it. ``forward`` calls ``model`` on the same input each time.
    """
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}

    def outputs() -> list[tuple[int, Tensor]]:
        seen: list[tuple[int, Tensor]] = []

        def keep(module: nn.Module, _given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and len(output) else output
            first = getattr(first, "last_hidden_state", first)
            if isinstance(first, Tensor):
                seen.append((id(module), first.detach().clone()))

        handles = [module.register_forward_hook(keep) for module in model.modules()]
        try:
            with torch.no_grad():
                forward()
        finally:
            for handle in handles:
                handle.remove()
        return seen

    for (module, first), (other, second) in zip(outputs(), outputs(), strict=False):
        if module != other or first.shape != second.shape or not torch.equal(first.nan_to_num(), second.nan_to_num()):
            return names[module]
    return None


def recomputes(model: Any) -> bool:
    """Return whether a Hugging Face model recomputes activations."""
    new = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if new is None else new)


def set_recomputation(model: Any, options: dict[str, Any] | None) -> None:
    """Let a Hugging Face model recompute activations with the ``options`` of ``torch.utils.checkpoint``, or not
    (None)."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if options is None:
        getattr(model, f"{name}_checkpointing_disable")()
    else:
        getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": options})
