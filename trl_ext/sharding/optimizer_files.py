"""The state of an optimizer as files, which are written and read part by part."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trl_ext.sharding.holder import State

RECORD = "optimizer.json"
"""The file with everything that is not a tensor."""
LARGEST = 2**30
"""Bytes of an optimizer's state after which another file begins."""


def save_optimizer(
    state: Iterable[tuple[int, dict[str, Any]]], groups: list[dict], folder: Path, more: dict[str, Any]
) -> None:
    """Save an optimizer as ``optimizer.safetensors`` and ``optimizer.json``.

    A larger state goes on in ``optimizer-1.safetensors`` and so on, so that memory holds a part of it only.

    Args:
        state: the index and the optimizer's state of each parameter.
        groups: the options of its parameter groups.
        folder: where the files go.
        more: further JSON values for ``optimizer.json``.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    files = 0
    for index, entries in state:
        for key, value in entries.items():
            if isinstance(value, dict):  # bitsandbytes nests its tensors, and its parameters share some of them
                tensors |= {f"{index}.{key}/{name}": entry.clone() for name, entry in value.items()}
            elif isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value.contiguous()
            else:
                numbers[f"{index}.{key}"] = value
        if sum(tensor.nbytes for tensor in tensors.values()) >= LARGEST:
            save_file(tensors, folder / _optimizer_file(files))
            tensors, files = {}, files + 1
    if tensors or not files:
        save_file(tensors, folder / _optimizer_file(files))
    (folder / RECORD).write_text(json.dumps({"numbers": numbers, "groups": groups, **more}))


def _optimizer_file(number: int) -> str:
    return f"optimizer-{number}.safetensors" if number else "optimizer.safetensors"


def read_optimizer(folder: Path) -> tuple[State, dict[str, Any]]:
    """Read what :func:`save_optimizer` wrote. Return the state, and the content of ``optimizer.json``.

    Tensors are read from the disk where they are used.
    """
    record = json.loads((folder / RECORD).read_text())
    state: State = {}
    files = [
        _optimizer_file(0),
        *(_optimizer_file(n) for n in range(1, len(list(folder.glob("optimizer-*.safetensors"))) + 1)),
    ]
    tensors = [item for file in files for item in load_file(folder / file).items()]
    for name, value in [*tensors, *record["numbers"].items()]:
        index, key = name.split(".", 1)
        entries = state.setdefault(int(index), {})
        if "/" in key:
            outer, key = key.split("/")
            entries = entries.setdefault(outer, {})
        entries[key] = value
    return state, record
