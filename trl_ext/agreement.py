"""Compare another way to read a model's adapters with the plain one, once for each, before anything is sampled by it."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor

from trl_ext.adapters import shaken
from trl_ext.forward import base_of
from trl_ext.randomness import evaluating

MOST_TOKENS = 12
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""The largest difference of logits, as a share of what the adapters change in them. It is :data:`ROUNDED` in half precision."""
ROUNDED = 0.2

_known: WeakKeyDictionary = WeakKeyDictionary()


def agrees(
    model: PeftModel, adapters: Sequence[str], way: str, read: Callable[[Tensor], Tensor]
) -> bool:
    """Return whether ``read`` gives the logits that ``model`` gives with each of ``adapters`` switched on.

    A new adapter changes nothing, so both are asked with noise on its weights, which are restored exactly.

    Args:
        model: the model, whose weights are whole.
        adapters: the names of the adapters.
        way: the name of the other way. The answer for a way and adapters is remembered.
        read: takes ids [N, T] with a row for each adapter, and returns logits [N, T, V] by the other way.
    """
    answers = _known.setdefault(model, {})
    key = (way, tuple(adapters))
    if key not in answers:
        answers[key] = _compare(model, adapters, read)
    return answers[key]


@torch.no_grad()
def _compare(model: PeftModel, adapters: Sequence[str], read: Callable[[Tensor], Tensor]) -> bool:
    base = base_of(model)
    device = next(base.parameters()).device
    if device.type == "meta":
        return False
    size = base.config.get_text_config().vocab_size
    ids = torch.linspace(0, size - 1, min(size, MOST_TOKENS), device=device).long()
    active = list(model.active_adapters)
    learning = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with evaluating(model), shaken(model, list(adapters)):
            plain = []
            for adapter in adapters:
                model.set_adapter(adapter)
                plain.append(base(input_ids=ids[None]).logits[0])
            with model.disable_adapter():
                off = base(input_ids=ids[None]).logits[0].float()
            try:
                other = read(ids.expand(len(adapters), -1)).float()
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                return False  # this model cannot be read that way
    finally:
        model.set_adapter(active[0] if len(active) == 1 else active)  # type: ignore[arg-type]  # several may be active
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
    expected = torch.stack(plain).float()
    effect, gap = float((expected - off).abs().max()), float((expected - other).abs().max())
    return gap <= TOLERANCE.get(base.dtype, ROUNDED) * effect
