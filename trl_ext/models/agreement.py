"""Compare another way to read a model's adapters with the plain one, once for each, before anything is sampled by
it."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor

from trl_ext.models.adapters import shaken, switches_restored
from trl_ext.models.forward import base_of
from trl_ext.models.randomness import evaluating

MOST_TOKENS = 12
EXACT, ROUNDED = 1e-3, 0.2
"""The largest difference of logits, as a share of what the adapters change in them, in float32 and in half precision.
"""

_known: WeakKeyDictionary = WeakKeyDictionary()


def agrees(model: PeftModel, rows: Sequence[str | None], way: str, read: Callable[[Tensor], Tensor]) -> bool:
    """Return whether ``read`` gives the logits that ``model`` gives with the adapter of each row switched on.

    A new adapter changes nothing, so both are asked with noise on its weights, which are restored exactly.

    Args:
        model: the model, whose weights are whole.
        rows: the adapter of each row that is read, or None for the base alone.
        way: the name of the other way. The answer for a way and rows is remembered.
        read: takes ids [1, T], and returns logits [N, T, V] by the other way.
    """
    answers = _known.setdefault(model, {})
    key = (way, tuple(rows), _rounded(model))
    if key not in answers:
        answers[key] = _compare(model, rows, read)
    return answers[key]


def _rounded(model: PeftModel) -> bool:
    """Return whether forwards are rounded to half precision now."""
    device = next(model.parameters()).device.type
    return base_of(model).dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(device)


@torch.no_grad()
def _compare(model: PeftModel, rows: Sequence[str | None], read: Callable[[Tensor], Tensor]) -> bool:
    base = base_of(model)
    device = next(base.parameters()).device
    if device.type == "meta":
        return False
    size = base.config.get_text_config().vocab_size
    ids = torch.linspace(0, size - 1, min(size, MOST_TOKENS), device=device).long()[None]
    adapters = [adapter for adapter in dict.fromkeys(rows) if adapter is not None]
    plain: dict[str | None, Tensor] = {}
    with switches_restored(model), evaluating(model), shaken(model, adapters):
        for adapter in adapters:
            model.set_adapter(adapter)
            plain[adapter] = base(input_ids=ids).logits[0].float()
        with model.disable_adapter():
            plain[None] = base(input_ids=ids).logits[0].float()
        try:
            other = read(ids).float()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False  # this model cannot be read that way
    effect = max(float((plain[adapter] - plain[None]).abs().max()) for adapter in adapters)
    gap = float((torch.stack([plain[adapter] for adapter in rows]) - other).abs().max())
    return gap <= (ROUNDED if _rounded(model) else EXACT) * effect
