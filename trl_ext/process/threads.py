"""Choose how many threads compute on the CPU, and how they wait for each other.

torch's own choice is a thread for each core that the process may use. That is wrong in two cases. Two trainings on one
machine then have twice as many threads as there are cores, and threads that wait by spinning take the cores from those
that compute. And ``accelerate launch`` and ``torchrun`` give each process one thread, whatever the machine has.
Importing this module does not import torch.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import psutil

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables by which a user sets the number of threads."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables by which a user says how threads wait: of OpenMP, of GNU's library and of Intel's."""
BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""How threads wait by default here: 1000 looks, which take some microseconds. Intel's library counts milliseconds."""
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
"""The variables by which a process knows that ``accelerate launch`` or ``torchrun`` has started it."""


@dataclass(frozen=True)
class Threads:
    """How many threads a process computes with, and why."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"threads: {self.count} ({self.why})"


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads sleep soon when they wait for each other, unless the user has set how they wait.

    By default a thread spins for some milliseconds at the end of each operation, and takes the core from a thread of
    another process that computes: two trainings on two cores then take four times as long as one. Threads that sleep at
    once slow a single training, because the next operation mostly follows within microseconds (``docs/lab/speed.md``
    has the figures). OpenMP reads the variables once, when torch is loaded, so this must be called before.
    """
    if not any(name in environment for name in WAITING):
        environment.update(BRIEFLY)


def choose(tiny: bool, environment: Mapping[str, str] = os.environ) -> Threads:
    """Return the threads for a run of this process. Nothing is changed.

    What the user has set by one of :data:`COUNTS` stays. A number that only the launcher has set does not count as
    such. ``tiny`` says that all models are tiny: their operations are too short to be shared.
    """
    import torch

    cores, processes = usable_cores(), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    share = max(1, cores // processes)
    if (name := _set_by_user(environment)) is not None:
        count = torch.get_num_threads()
        most = f"{share} of {cores} cores" if processes > 1 else f"{cores} cores"
        unused = f"; this process could use {most}" if count < share and not tiny else ""
        crowded = f"; there are {cores} cores for {processes * count} threads" if processes * count > cores else ""
        return Threads(count, f"{name}={environment[name]} is set{unused}{crowded}")
    if tiny:
        return Threads(1, f"tiny models gain nothing from more; {COUNTS[0]} sets another number")
    if processes > 1:
        return Threads(share, f"{cores} cores for {processes} processes")
    return Threads(share, "one for each core that this process may use")


def use(threads: Threads) -> None:
    """Let torch compute with so many threads."""
    import torch

    torch.set_num_threads(threads.count)


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no such function
        return os.cpu_count() or 1


def _set_by_user(environment: Mapping[str, str]) -> str | None:
    """Return the variable by which the user has set the number of threads, or None."""
    name = next((name for name in COUNTS if environment.get(name)), None)
    if name == COUNTS[0] and any(launched in environment for launched in LAUNCHED) and _launcher_chose():
        return None
    return name


def _launcher_chose() -> bool:
    """Return whether the launcher set the number of threads by itself."""
    # It did if its own environment has none, and its command has no --num_cpu_threads_per_process. A launcher that
    # cannot be asked is taken to say what the user wants.
    try:
        launcher = psutil.Process().parent()
        if launcher is None:
            return False
        words = " ".join(launcher.cmdline()).replace("-", "_")
        return COUNTS[0] not in launcher.environ() and "__num_cpu_threads_per_process" not in words
    except psutil.Error:
        return False
