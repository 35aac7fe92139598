"""An adapter added into the weights for the time of a rollout, exactly undone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer


def plain_lora(model: PeftModel, adapter: str) -> bool:
    """Whether an adapter is a sum of low-rank products and nothing else."""
    config = model.peft_config[adapter]
    return isinstance(config, LoraConfig) and not config.use_dora and not config.modules_to_save


def merges(model: Any, adapter: str | None) -> bool:
    """Whether :func:`merged` can serve: plain LoRA on weights that are floating-point numbers."""
    if not isinstance(model, PeftModel) or adapter is None:
        return False
    return plain_lora(model, adapter) and all(
        layer.get_base_layer().weight.is_floating_point() for layer in _layers(model, adapter)
    )


@contextmanager
def merged(model: PeftModel, adapter: str) -> Iterator[Any]:
    """The base model with ``adapter`` in its weights: it samples as fast as without. Afterwards the weights are what they were.

    The sums are new tensors, put in the place of the weights, so nothing is subtracted again and half precision does not
    drift; they take the memory of the layers that have an adapter.
    """
    kept = []
    try:
        for layer in _layers(model, adapter):
            weight = layer.get_base_layer().weight
            kept.append((weight, weight.data))
            weight.data = weight.data + layer.get_delta_weight(adapter).to(weight.dtype)
        with model.disable_adapter():
            yield model.get_base_model()
    finally:
        for weight, data in kept:
            weight.data = data


def _layers(model: PeftModel, adapter: str) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer) and adapter in m.lora_A]
