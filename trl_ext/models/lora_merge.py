"""Merge a LoRA adapter into the weights during a rollout, and restore the weights exactly afterwards."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from trl_ext.models.adapters import adapter_parameters
from trl_ext.models.agreement import agrees


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


def merges(model: Any, adapter: str | None) -> bool:
    """Return whether :func:`merged` suits ``adapter``: it must be a LoRA of linear layers on weights that compute in
    float32.

    In half precision, and in mixed precision, the sums would be rounded. A weight of 1 has neighbours 0.004 away in
    bfloat16, so a small adapter would vanish, and the samples would come from the base model. A weight that another
    module shares, such as that of a tied head, would change there too. What both ways compute is compared once.
    """
    if not isinstance(model, PeftModel) or adapter is None or (layers := matrices(model, adapter)) is None:
        return False
    weights = [layer.base_layer.weight for layer in layers]
    if torch.is_autocast_enabled(weights[0].device.type):
        return False
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    if any(weight.dtype != torch.float32 or places[id(weight)] > 1 for weight in weights):
        return False

    def compared(ids: torch.Tensor) -> torch.Tensor:
        with merged(model, adapter) as base:
            return base(input_ids=ids).logits

    return agrees(model, [adapter], "merged", compared)


@contextmanager
def merged(model: PeftModel, adapter: str) -> Iterator[Any]:
    """Yield the base model with ``adapter`` added to its weights. It samples as fast as the base model alone.

    The sums are new tensors that replace the weights. The old weights are put back at the end, so they do not drift.
    The sums take as much memory as the layers that have an adapter.
    """
    originals = []
    try:
        for layer in _layers(model, adapter):
            weight = layer.get_base_layer().weight
            originals.append((weight, weight.data))
            weight.data = weight.data + layer.get_delta_weight(adapter)
        with model.disable_adapter():
            yield model.get_base_model()
    finally:
        for weight, data in originals:
            weight.data = data


def _layers(model: PeftModel, adapter: str) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer) and adapter in m.lora_A]
