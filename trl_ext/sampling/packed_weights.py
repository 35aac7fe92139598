"""Matrix products of few rows on a CPU, by weights in the order in which oneDNN reads them.

A step of decoding multiplies every weight with one row for each completion. torch gives the weights to the product as
they are, which is in no good order for so few rows. Here each linear layer multiplies with a packed copy of its
weights, as torch's compiler lets it where weights are frozen. ``docs/performance.md`` says what that saves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trl_ext.process.devices import free_bytes

FEWEST_STEPS = 16
"""The fewest steps of decoding that win back the time in which weights are packed: it is that of some eight steps."""
SMALLEST = 2**16
"""The fewest numbers of a weight for which the product, and not its call, takes the time."""


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Let the linear layers of ``model`` multiply with packed copies of their weights, on a CPU with oneDNN's kernels.

    The weights must not change meanwhile. The copies take as much memory as the weights, and are not made where they
    would take more than half of what is free. With gradients, layers multiply as they are.
    """
    layers = [layer for layer in model.modules() if _packs(layer)] if _known() else []
    free = free_bytes(torch.device("cpu")) if layers else 0
    if free is not None and 2 * sum([layer.weight.nbytes for layer in layers]) > free:
        layers = []
    try:
        for layer in layers:
            order = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            layer.forward = partial(_product, layer, order)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _known() -> bool:
    """Return whether torch has oneDNN's kernels, and the operators that pack weights for them, on this processor."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packs(layer: nn.Module) -> bool:
    """Return whether a module is a linear layer of plain weights that is worth packing. Others, such as quantized ones,
    and those whose forward somebody has wrapped, multiply as they are."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    weight = layer.weight.data
    if type(weight) is not Tensor or weight.device.type != "cpu" or weight.numel() < SMALLEST:
        return False
    halved = weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32 or halved


def _product(layer: nn.Linear, order: Tensor, rows: Tensor) -> Tensor:
    if torch.is_grad_enabled() or rows.dtype is not order.dtype or torch.is_autocast_enabled("cpu"):
        return linear(rows, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(rows, order, layer.bias, "none", [], "")
