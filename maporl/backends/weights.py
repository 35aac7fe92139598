"""Weights on their way from the process that learns to those that sample: one flat buffer, with what is in it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maporl.team.agents import Policy
from trl_ext.errors import UserError
from trl_ext.models.adapters import adapter_parameters
from trl_ext.models.forward import base_of


class WeightsDiffer(UserError, RuntimeError):
    """The weights that arrived are not those that were sent."""


@dataclass(frozen=True)
class Packed:
    """The weights of a policy: its adapter, or its whole model.

    Args:
        entries: the name, the dtype and the shape of each tensor, in the order of the buffer.
        sums: the sum of each tensor in float64, by which a receiver checks what it has loaded.
        buffer: the bytes of all tensors.
    """

    entries: list[tuple[str, str, tuple[int, ...]]]
    sums: list[float]
    buffer: np.ndarray


def sent_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """Return the parameters of a policy that change, by name: those of its adapter, without its name in them, or
    all."""
    if policy.adapter is not None:
        return adapter_parameters(policy.model, policy.adapter)
    return dict(base_of(policy.model).named_parameters())


def pack(named: Iterable[tuple[str, Tensor]], size: int) -> Packed:
    """Copy tensors of together ``size`` bytes one after the other into a buffer in main memory.

    Each is forgotten before the next one is asked for, so that a device need not hold all of them.
    """
    # FSDP frees the storage of gathered weights, which numpy would pin; so they are copied into a tensor of our own
    buffer = torch.empty(size, dtype=torch.uint8)
    start, entries, sums = 0, [], []
    for name, tensor in named:
        values = tensor.detach()
        buffer[start : start + values.nbytes].copy_(values.contiguous().view(-1).view(torch.uint8))
        start += values.nbytes
        entries.append((name, str(values.dtype).removeprefix("torch."), tuple(values.shape)))
        sums.append(_sum(values))
        del tensor, values
    assert start == size, f"the tensors have {start} bytes, and {size} were announced"
    return Packed(entries, sums, buffer.numpy())


def tensors_of(packed: Packed) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each tensor of ``packed`` with its name."""
    start = 0
    for name, kind, shape in packed.entries:
        dtype = getattr(torch, kind)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        yield name, torch.from_numpy(packed.buffer[start : start + size].copy()).view(dtype).view(shape)
        start += size


@torch.no_grad()
def unpack(packed: Packed, parameters: dict[str, Any]) -> None:
    """Copy the tensors of ``packed`` into ``parameters``, and check what is there afterwards.

    Raises:
        WeightsDiffer: a tensor is missing or has another shape, or its numbers have another sum.
    """
    names = [name for name, *_ in packed.entries]
    if set(names) != parameters.keys():
        other = sorted(set(names) ^ parameters.keys())[0]
        raise WeightsDiffer(
            f"weights: {other!r} is on one side only; expected {len(parameters)} tensors, got {len(names)}"
        )
    for (name, values), expected in zip(tensors_of(packed), packed.sums, strict=True):
        parameter = parameters[name]
        if parameter.shape != values.shape:
            raise WeightsDiffer(f"weights: {name!r} has shape {tuple(parameter.shape)}, got {tuple(values.shape)}")
        parameter.copy_(values)
        total = _sum(parameter.detach())
        if not np.isclose(total, expected, rtol=1e-9, atol=1e-9, equal_nan=True):
            raise WeightsDiffer(f"weights: {name!r} sums to {total} after loading, expected {expected}")


def _sum(tensor: Tensor) -> float:
    return float(tensor.double().sum())
