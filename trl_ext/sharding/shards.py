"""Weights and optimizer states in shards: each process writes the ranges that it holds, and any process reads any
range.

A shard is a range of a flattened parameter, or of a part of its optimizer state. FSDP2's rows, ZeRO's partitions and
whole tensors all are such ranges. A folder of shards can therefore be read by any number of processes under any
strategy, and no process needs a whole model to write it. The files are safetensors, and an entry's name says which
range it is. They hold no pickles, which torch's own distributed checkpoints do.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trl_ext.files.atomic import flush
from trl_ext.files.manifest import CheckpointError, digest_of
from trl_ext.process import distributed

SHARDS = "shards"
"""The folder of the shards in a policy's folder of a checkpoint."""
WEIGHT = "weight"
"""The part of a parameter that is its value: in float32 if it is trained."""
LARGEST = 2**30
"""Bytes after which a process begins another file."""


@dataclass
class Shard:
    """The numbers of ``part`` of the parameter ``name`` that begin at ``start`` in the flattened whole, as a vector."""

    name: str
    part: str
    start: int
    values: Tensor


class ShardWriter:
    """Collects the shards of this process in main memory, and writes them later, perhaps in another thread."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, dict[str, Tensor]]] = []

    def add(self, folder: Path, shards: Iterable[Shard]) -> None:
        """Copy ``shards`` to main memory. They belong to the policy whose folder is ``folder``."""
        self._files += _files(folder, shards)

    def write(self) -> dict[Path, str]:
        """Write the files, and return each with its SHA-256. What was collected is forgotten.

        Raises:
            CheckpointError: this process does not see the folder of the checkpoint.
        """
        digests = {}
        while self._files:
            path, tensors = self._files.pop()
            _write(path, tensors)
            digests[path] = digest_of(path)
        return digests


def save_shards(folder: Path, shards: Iterable[Shard]) -> None:
    """Write ``shards`` of this process at once, so that memory holds a part of them only.

    Raises:
        CheckpointError: this process does not see the folder.
    """
    for path, tensors in _files(folder, shards):
        _write(path, tensors)


def entries(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Return copies of ``shards`` in main memory, by names that say which range of what they are."""
    return {f"{s.name}/{s.part}@{s.start}": s.values.detach().to("cpu", copy=True) for s in shards}


def _files(folder: Path, shards: Iterable[Shard]) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Yield the files of this process with their content, copied to main memory."""
    held: dict[str, Tensor] = {}
    count = 0
    for shard in shards:
        held |= entries([shard])
        if sum(values.nbytes for values in held.values()) >= LARGEST:
            yield folder / SHARDS / _file(count), held
            held, count = {}, count + 1
    if held:
        yield folder / SHARDS / _file(count), held


def _file(number: int) -> str:
    return f"process-{distributed.rank()}-{number}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of shards."""
    if not path.parent.parent.is_dir():
        raise CheckpointError(
            f"{path.parent.parent}: process {distributed.rank()} does not see the checkpoint that the main "
            "process began there; the output folder must be one that all machines share"
        )
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    flush(path)


@dataclass
class _Held:
    """Tensors in main memory, which are read as a file of safetensors is."""

    part: Mapping[str, Tensor]

    def get_slice(self, entry: str) -> Tensor:
        return self.part[entry]


def flattened(name: str, part: str, values: Tensor) -> Shard:
    """Return the whole of ``values`` as one shard."""
    return Shard(name, part, 0, values.detach().flatten())


class Shards:
    """The shards that processes wrote into a folder. They are read from the disk where they are used.

    Args:
        folder: the folder.
        partial: whether weights may be missing, because they are elsewhere.

    Raises:
        CheckpointError: a file cannot be read, or holds something else than shards.
    """

    def __init__(self, folder: Path, partial: bool = False):
        self.folder, self.partial = folder, partial
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
                for entry in file.keys():  # noqa: SIM118  # it is not a mapping
                    self._add(entry, file.get_slice(entry).get_shape()[0], file)
            except (OSError, SafetensorError, ValueError, IndexError) as error:
                raise CheckpointError(f"{path}: cannot be read as shards ({error}); use another checkpoint") from error
        self._sort()

    @classmethod
    def held(cls, parts: Iterable[Mapping[str, Tensor]]) -> "Shards":
        """Return shards that are in main memory: what :func:`entries` returned in each process, perhaps not of all
        weights."""
        shards = cls(Path("memory"), partial=True)
        for part in parts:
            for entry, values in part.items():
                shards._add(entry, len(values), _Held(part))
        shards._sort()
        return shards

    def renamed(self, names: Mapping[str, str]) -> "Shards":
        """Return the shards with other ``names`` of parameters, by those in the files."""
        self._pieces = {(names.get(name, name), part): pieces for (name, part), pieces in self._pieces.items()}
        return self

    def _add(self, entry: str, length: int, file: Any) -> None:
        name, _, rest = entry.rpartition("/")
        part, _, start = rest.partition("@")
        self._pieces.setdefault((name, part), []).append((int(start), length, file, entry))

    def _sort(self) -> None:
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def lacks(self, name: str) -> bool:
        """Return whether the weights of ``name`` are missing because they are elsewhere."""
        return self.partial and not self.has(name)

    def has(self, name: str, part: str = WEIGHT) -> bool:
        """Return whether the folder holds ``part`` of the parameter ``name``."""
        return (name, part) in self._pieces

    def parts(self, name: str) -> list[str]:
        """Return the parts of the optimizer's state that the folder holds for the parameter ``name``."""
        return [part for owner, part in self._pieces if owner == name and part != WEIGHT]

    def names(self) -> list[str]:
        """Return the names of the parameters, sorted."""
        return sorted({name for name, part in self._pieces if part == WEIGHT})

    def read(self, name: str, part: str, start: int, end: int) -> Tensor:
        """Return the numbers from ``start`` to ``end`` of ``part`` of the flattened parameter ``name``, as a vector.

        Raises:
            CheckpointError: the shards do not hold all of them.
        """
        pieces, reached = [], start
        for first, length, file, entry in self._pieces.get((name, part), ()):
            if first <= reached < min(first + length, end):
                pieces.append(file.get_slice(entry)[reached - first : min(first + length, end) - first])
                reached = min(first + length, end)
        if reached < end:
            raise CheckpointError(
                f"{self.folder}: holds numbers {start} to {reached} of {name!r} ({part}), expected {start} to {end}; "
                "the checkpoint is of another model, or a process's file is missing"
            )
        return torch.cat(pieces) if pieces else torch.empty(0)

    def whole(self, name: str, part: str, shape: Any) -> Tensor:
        """Return ``part`` of the parameter ``name`` in its ``shape``.

        Raises:
            CheckpointError: the shards do not hold exactly so many numbers.
        """
        size = torch.Size(shape).numel()
        held = max((first + length for first, length, *_ in self._pieces.get((name, part), ())), default=0)
        if held > size:
            raise CheckpointError(f"{self.folder}: {name!r} has {held} numbers, expected {size}, as of another model")
        return self.read(name, part, 0, size).view(shape)


@torch.no_grad()
def load_model(model: nn.Module, shards: Shards, prefix: str) -> None:
    """Give the parameters of ``model`` the weights in ``shards``, whose names begin with ``prefix``.

    Raises:
        CheckpointError: the shards are not exactly those of the model.
    """
    parameters = dict(model.named_parameters())
    held = {name.removeprefix(prefix) for name in shards.names() if name.startswith(prefix)}
    if held != parameters.keys():
        other = sorted(held ^ parameters.keys())[0]
        raise CheckpointError(
            f"{shards.folder}: {'lacks' if other in parameters else 'holds'} {other!r}, so it is not of this model; "
            f"expected {len(parameters)} parameters, got {len(held)}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(shards.whole(prefix + name, WEIGHT, parameter.shape))


def state_shards(name: str, shape: Any, state: Mapping[str, Any]) -> Iterator[Shard]:
    """Yield the parts of a parameter's optimizer state that have its ``shape``."""
    for part, value in state.items():
        if has_shape(value, shape):
            yield flattened(name, part, value)


def has_shape(value: Any, shape: Any) -> bool:
    """Return whether a part of an optimizer's state has one number for each number of a parameter of ``shape``.

    Others, such as counts of steps, are small and are kept in one piece.
    """
    return isinstance(value, Tensor) and value.shape == shape
