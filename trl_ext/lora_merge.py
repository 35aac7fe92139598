"""Merge a LoRA adapter into the weights during a rollout, and restore the weights exactly afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer


def plain_lora(model: PeftModel, adapter: str) -> bool:
    """Return whether an adapter is an ordinary LoRA: without DoRA and without fully trained modules."""
    config = model.peft_config[adapter]
    return isinstance(config, LoraConfig) and not config.use_dora and not config.modules_to_save


def merges(model: Any, adapter: str | None) -> bool:
    """Return whether :func:`merged` suits ``adapter``: it must be an ordinary LoRA on float32 weights.

    In half precision the sums would be rounded. A weight of 1 has neighbours 0.004 away in bfloat16, so a small adapter
    would vanish, and the samples would come from the base model.
    """
    if not isinstance(model, PeftModel) or adapter is None:
        return False
    return plain_lora(model, adapter) and all(
        layer.get_base_layer().weight.dtype == torch.float32 for layer in _layers(model, adapter)
    )


@contextmanager
def merged(model: PeftModel, adapter: str) -> Iterator[Any]:
    """Yield the base model with ``adapter`` added to its weights. It samples as fast as the base model alone.

    The sums are new tensors that replace the weights. The old weights are put back at the end, so they do not drift. The
    sums take as much memory as the layers that have an adapter.
    """
    kept = []
    try:
        for layer in _layers(model, adapter):
            weight = layer.get_base_layer().weight
            kept.append((weight, weight.data))
            weight.data = weight.data + layer.get_delta_weight(adapter)
        with model.disable_adapter():
            yield model.get_base_model()
    finally:
        for weight, data in kept:
            weight.data = data


def _layers(model: PeftModel, adapter: str) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer) and adapter in m.lora_A]
