"""Notice that a run's data have changed since it began.

A resumed run goes through its data in the order that its seed gives. With other rows, or the same rows in another
order, it would see some questions twice and others never, and its evaluations before and after would not be of the same
questions. So a run keeps ``data_fingerprints.json``: for each data set its number of rows and a hash of its content.
The hash does not depend on where the data lie.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_ext.files.atomic import replace_file
from trl_ext.files.manifest import DATA, CheckpointError

MOST = 100_000
"""The most rows that are read.

Of larger data sets, so many rows at even distances count, besides the number of rows.
"""
_READ_TWICE = 100

Fingerprint = dict[str, Any]


class DataChanged(CheckpointError):
    """A data set differs from the one that the run was begun with."""


def fingerprint(rows: Sequence[Any]) -> Fingerprint:
    """Return the number of ``rows``, and the SHA-256 of their content in their order.

    A row is a JSON value or a dataclass. Values that JSON cannot hold, such as pictures, count by their type only. The
    hash is None if two readings of the first rows differ, as they do where rows are augmented at random.
    """
    size = len(rows)
    first = range(min(size, _READ_TWICE))
    digest = _digest(rows, first)
    if digest != _digest(rows, first):
        return {"rows": size, "sha256": None}
    if size > _READ_TWICE:
        digest = _digest(rows, [n * size // MOST for n in range(MOST)] if size > MOST else range(size))
    return {"rows": size, "sha256": digest}


def remember_data(folder: Path, data: Mapping[str, Fingerprint], record: str = DATA) -> None:
    """Write the fingerprints of a new run's ``data``, by the names of the data sets, into the file ``record`` of its
    ``folder``.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / record, json.dumps(data, indent=1))


def check_data(
    folder: Path, data: Mapping[str, Fingerprint], record: str = DATA, what: str = "data set"
) -> dict[str, Fingerprint]:
    """Check that the ``data`` of a resumed run are those that :func:`remember_data` wrote into ``folder``, and return
    these.

    The user may have removed the file in order to go on with other data. ``record`` is the file's name, and ``what`` is
    what one of ``data`` is called in errors.

    Raises:
        DataChanged: a data set has other rows, or the same rows in another order.
    """
    file = folder / record
    fingerprints = _read(file) if file.is_file() else {}
    for name, now in data.items():
        was = fingerprints.get(name, now)
        if was == now or (was["rows"] == now["rows"] and None in (was["sha256"], now["sha256"])):
            continue
        rows = (
            "the same number of rows" if was["rows"] == now["rows"] else f"{was['rows']} rows then, {now['rows']} now"
        )
        raise DataChanged(
            f"{folder}: the {what} {name!r} has changed since the run began ({rows}, with other content or in another "
            f"order); restore it, or begin another run. To go on with the data as they are now: remove {file}"
        )
    return fingerprints


def _read(file: Path) -> dict[str, Fingerprint]:
    try:
        fingerprints = json.loads(file.read_text(encoding="utf-8"))
        if all(entry.keys() >= {"rows", "sha256"} for entry in fingerprints.values()):
            return fingerprints
    except (ValueError, AttributeError):  # invalid JSON, or not a mapping of mappings
        pass
    raise DataChanged(f"{file}: is damaged, so nothing tells whether the data are the same; remove it to go on")


def _digest(rows: Sequence[Any], numbers: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for number in numbers:
        digest.update(_text(rows[number]).encode() + b"\n")
    return digest.hexdigest()


def _text(row: Any) -> str:
    try:
        return json.dumps(row, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys of several types, or a row that contains itself
        return type(row).__name__


def _plain(value: Any) -> Any:
    """Return what stands for a value that JSON cannot hold."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}  # json asks for what is in it
    return type(value).__name__
