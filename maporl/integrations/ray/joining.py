"""What the machines of a cluster must have in common, and whether they do. Imports no torch and no Ray."""

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from maporl import __version__
from maporl.errors import ConfigError

PACKAGES = ("maporl", "trl_ext")
"""The packages whose code is compared."""
CLOCKS = 5.0
"""The most seconds by which clocks may differ before a warning."""
SHARED_MEMORY = Path("/dev/shm")
MARK = ".every-machine-sees-this"


@dataclass(frozen=True)
class Facts:
    """The properties of one machine.

    Args:
        versions: the versions of Python and of packages, by name. One that is missing is ``none``.
        code: a digest of the code of :data:`PACKAGES`.
        clock: its time, in seconds.
        shared_memory: the bytes of its shared memory that Ray's objects can take. None: it has no
            :data:`SHARED_MEMORY`.
        mark: what it reads in the run's folder. None: nothing.
    """

    versions: Mapping[str, str]
    code: str
    clock: float
    shared_memory: int | None
    mark: str | None


def facts_here(folder: str) -> Facts:
    """Return the facts of this machine, where the run is in ``folder``."""
    versions = {"Python": platform.python_version(), "maporl": __version__}
    for name in ("ray", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    mark = Path(folder) / MARK
    read = mark.read_text() if mark.is_file() else None
    return Facts(versions, code_digest(), time.time(), free_shared_memory(), read)


def free_shared_memory(folder: Path = SHARED_MEMORY) -> int | None:
    """Return the free bytes of this machine's shared memory, or None if it has no such ``folder``."""
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def code_digest() -> str:
    """Return a digest of the names and the contents of all Python files of :data:`PACKAGES`."""
    digest = hashlib.sha256()
    for name in PACKAGES:
        spec = find_spec(name)
        for root in spec.submodule_search_locations or () if spec is not None else ():
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(f"{name}/{path.relative_to(root).as_posix()}\0".encode())
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Write a file into the run's folder that every machine must see.

    Return what is in it, and remove it in the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = os.urandom(8).hex()
    (folder / MARK).write_text(text)
    try:
        yield text
    finally:
        (folder / MARK).unlink(missing_ok=True)


def check_facts(
    here: Facts, machines: Mapping[str, tuple[Facts, float]], mark: str, folder: Path, largest: int
) -> list[str]:
    """Check that machines fit together. Return warnings.

    Args:
        here: the facts of the driver.
        machines: the facts of each machine by its name, and the driver's time when it told them.
        mark: what each must have read in the run's folder.
        folder: the run's folder.
        largest: the bytes of the largest weights that are sent.

    Raises:
        ConfigError: a machine has other versions or other code, does not see the run's folder, or has too little shared
            memory.
    """
    warnings = []
    for name, (there, told) in machines.items():
        where = f"cluster: machine {name}"
        for package, expected in here.versions.items():
            if there.versions[package] != expected:
                raise ConfigError(
                    f"{where} has {package} {there.versions[package]}, and this one has {expected}; install the same "
                    "everywhere"
                )
        if there.code != here.code:
            raise ConfigError(
                f"{where} has other code of {' and '.join(PACKAGES)} (digest {there.code}, here {here.code}) of the "
                f"same version {here.versions['maporl']}; update its checkout or its image"
            )
        if there.mark != mark:
            raise ConfigError(
                f"{where} does not see this machine's folder {folder}; put output_dir on storage that all machines "
                "share, because their processes write the checkpoints"
            )
        check_shared_memory(there.shared_memory, largest, where)
        if abs(there.clock - told) > CLOCKS:
            warnings.append(
                f"warning: the clock of machine {name} is {abs(there.clock - told):.0f} s "
                f"{'ahead of' if there.clock > told else 'behind'} this one's; times in logs will not agree; use NTP"
            )
    return warnings


def check_shared_memory(free: int | None, largest: int, where: str) -> None:
    """Check that a machine's shared memory holds the largest weights that are sent.

    Raises:
        ConfigError: it does not.
    """
    if free is not None and free < largest:
        raise ConfigError(
            f"{where} has {free / 1e9:.2f} GB of shared memory for Ray's objects, and the largest weights that are "
            f"sent take {largest / 1e9:.2f} GB; enlarge {SHARED_MEMORY} (Docker: --shm-size; Kubernetes: an emptyDir "
            "with medium: Memory) and ray start --object-store-memory"
        )
