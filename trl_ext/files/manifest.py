"""The manifest of a checkpoint: ``MANIFEST.json`` lists every file with its SHA-256. Imports no torch."""

import errno
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from trl_ext.errors import UserError

MANIFEST = "MANIFEST.json"
DATA = "data_fingerprints.json"
CHECKPOINT = ("state.json", "rng.safetensors", "policies")
"""Files and folders that every checkpoint has."""
_BROKEN_DISK = (errno.EIO, errno.EBADMSG)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged, or it belongs to another run."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or differs from what was written, so that an older checkpoint must serve."""


def write_manifest(folder: Path, known: Mapping[Path, str] | None = None) -> None:
    """Write the manifest of all files in ``folder``. Those whose SHA-256 is ``known`` are not read again.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    known = known or {}
    files = {
        str(path.relative_to(folder)): known.get(path) or digest_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def verify(folder: Path, required: Iterable[str] = CHECKPOINT) -> None:
    """Check that a checkpoint holds exactly the files of its manifest, and that each has the content of its hash.

    ``required`` names files and folders that the manifest must list. Hidden files, which file managers and network file
    systems leave, are ignored.

    Raises:
        DamagedCheckpoint: the manifest or a file is missing or damaged.
        CheckpointError: a file cannot be read, or the manifest does not list it. It could change what is loaded.
    """
    try:
        listed = _read_manifest(folder, required)
        for name, digest in listed.items():
            if not (folder / name).is_file() or digest_of(folder / name) != digest:
                raise DamagedCheckpoint(f"{folder}: {name} is missing or damaged; use another checkpoint")
        unlisted = sorted(_files(folder) - listed.keys())
    except OSError as error:
        if error.errno in _BROKEN_DISK:
            raise DamagedCheckpoint(f"{error.filename}: {error.strerror}; use another checkpoint") from error
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}); make it readable") from error
    if unlisted:
        raise CheckpointError(f"{folder}: holds {unlisted[0]!r}, which is not in its {MANIFEST}; move it elsewhere")


def _read_manifest(folder: Path, required: Iterable[str]) -> dict[str, str]:
    file = folder / MANIFEST
    if not file.is_file():
        raise DamagedCheckpoint(f"{folder}: no {MANIFEST}, so this is not a whole checkpoint; use another one")
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # invalid UTF-8, invalid JSON, or thousands of nested brackets
        listed = None
    if not isinstance(listed, dict) or not all(_is_entry(name, digest) for name, digest in listed.items()):
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is damaged: expected a SHA-256 for each file; use another one")
    missing = [part for part in required if not any(name == part or name.startswith(f"{part}/") for name in listed)]
    if missing:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} does not list {', '.join(missing)}; use another checkpoint")
    return listed


def _is_entry(name: str, digest: object) -> bool:
    path = PurePosixPath(name)
    plain = name.isprintable() and not path.is_absolute() and ".." not in path.parts and name != MANIFEST
    return plain and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None


def _files(folder: Path) -> set[str]:
    """Return the files of a checkpoint besides its manifest and hidden files."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {str(path) for path in paths if not any(part.startswith(".") for part in path.parts)} - {MANIFEST}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
