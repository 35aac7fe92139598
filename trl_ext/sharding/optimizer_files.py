"""The state of an optimizer as files: ranges of what has one number for each weight, and everything else.

Each process writes its ranges of moments and master weights into a folder ``shards`` (:mod:`trl_ext.sharding.shards`),
and the main process the rest, such as counts of steps, into ``optimizer.json`` and ``optimizer.safetensors``. Any
number of processes reads them, under any strategy. Older versions wrote whole tensors into ``optimizer.safetensors``,
which are read too.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trl_ext.files.manifest import CheckpointError
from trl_ext.process import distributed
from trl_ext.sharding.holder import Holder, State
from trl_ext.sharding.master_weights import MASTER
from trl_ext.sharding.shards import SHARDS, WEIGHT, Shards, entries, flattened, has_shape, save_shards

OPTIMIZER = "optimizer"
"""The folder of an optimizer, beside the weights that it steps."""
RECORD = "optimizer.json"
"""The file with everything that is not a tensor."""
LARGEST = 2**30
"""Bytes of tensors after which another file begins."""


def save_optimizer(holder: Holder, folder: Path, scheduler: Any = None, **more: Any) -> None:
    """Save the optimizer of ``holder`` and its ``scheduler`` in the folder ``optimizer`` of ``folder``.

    Every process writes its part of the state, with the master weights of weights in half precision.

    Args:
        holder: holds what is trained.
        folder: where the weights are saved.
        scheduler: the schedule of the learning rate, if there is one.
        more: further JSON values for ``optimizer.json``.
    """
    if distributed.is_main():
        (folder / OPTIMIZER).mkdir(exist_ok=True)
    numbers = {name: str(number) for number, name in enumerate(holder.names)}  # adapters may have other names later
    save_shards(folder / OPTIMIZER, (replace(shard, name=numbers[shard.name]) for shard in holder.shards(holder.half)))
    save_record(holder, folder, scheduler, **more)


def save_record(holder: Holder, folder: Path, scheduler: Any = None, **more: Any) -> None:
    """Save what :func:`save_optimizer` does without the shards, in the main process.

    A larger part than ``LARGEST`` goes on in ``optimizer-1.safetensors`` and so on, so that memory holds a part of it
    only.
    """
    if not distributed.is_main():
        return
    place = folder / OPTIMIZER
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    files = 0
    for index, parts in holder.optimizer_rest().items():
        for key, value in parts.items():
            if isinstance(value, dict):  # bitsandbytes nests its tensors, and its parameters share some of them
                tensors |= {f"{index}.{key}/{name}": entry.clone() for name, entry in value.items()}
            elif isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value.contiguous()
            else:
                numbers[f"{index}.{key}"] = value
        if sum(tensor.nbytes for tensor in tensors.values()) >= LARGEST:
            save_file(tensors, place / _file(files))
            tensors, files = {}, files + 1
    if tensors or not files:
        save_file(tensors, place / _file(files))
    record = {"numbers": numbers, "groups": holder.optimizer_groups()}
    if scheduler is not None:
        record["scheduler"] = scheduler.state_dict()
    (place / RECORD).write_text(json.dumps(record | more))


def load_optimizer(holder: Holder, folder: Path, scheduler: Any = None) -> dict[str, Any]:
    """Load what :func:`save_optimizer` wrote, after the weights. All processes call this together.

    If the weights are in shards too, they are loaded with the optimizer.

    Returns:
        The content of ``optimizer.json``.

    Raises:
        CheckpointError: the files are not those of this optimizer.
    """
    place = folder if (folder / RECORD).is_file() else folder / OPTIMIZER  # as in older versions, or as now
    record = json.loads((place / RECORD).read_text())
    here = len(holder.optimizer_groups())
    if len(record["groups"]) != here:
        raise CheckpointError(
            f"{place}: its optimizer has {len(record['groups'])} groups of weights and this one has {here}. Earlier "
            "versions shrank norms and biases by weight decay too; begin another run from the checkpoint's weights"
        )
    rest = _read_rest(place, record["numbers"])
    if (folder / SHARDS).is_dir():
        saved = Shards(folder / SHARDS)
    elif (place / SHARDS).is_dir():
        names = {str(number): name for number, name in enumerate(holder.names)}
        saved = Shards(place / SHARDS, partial=True).renamed(names)
    else:
        saved = _whole_tensors(rest, holder)
    holder.load_shards(saved, rest, record["groups"])
    if scheduler is not None:
        scheduler.load_state_dict(record["scheduler"])
    return record


def _file(number: int) -> str:
    return f"optimizer-{number}.safetensors" if number else "optimizer.safetensors"


def _read_rest(place: Path, numbers: dict[str, Any]) -> State:
    """Return everything but shards, by the index of the parameter."""
    rest: State = {}
    files = [_file(n) for n in range(1 + len(list(place.glob("optimizer-*.safetensors"))))]
    tensors = [item for file in files for item in load_file(place / file).items()]
    for name, value in [*tensors, *numbers.items()]:
        index, key = name.split(".", 1)
        parts = rest.setdefault(int(index), {})
        if "/" in key:
            outer, key = key.split("/")
            parts = parts.setdefault(outer, {})
        parts[key] = value
    return rest


def _whole_tensors(rest: State, holder: Holder) -> Shards:
    """Take the whole tensors of an older version out of ``rest``, and return them as shards."""
    taken: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(holder.shapes.items()):
        parts = rest.get(index, {})
        for key in [key for key, value in parts.items() if has_shape(value, shape)]:
            taken |= entries([flattened(name, WEIGHT if key == MASTER else key, parts.pop(key))])
    return Shards.held([taken])
