"""A process of a group, whatever has started it: its settings, the driver's requests to it, and its logs.

Imports no torch and no Ray.
"""

import copy
import faulthandler
import os
import re
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from maporl.config.schema import Config
from maporl.errors import RunError
from maporl.integrations.vllm.section import VLLMSection
from trl_ext.files.paths import below
from trl_ext.files.stacks import FOLDER

# -- what it is told ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSpec:
    """A group and its run.

    Args:
        name: the group's name.
        config: describes the team, and names the run's folder.
        policies: the policies of the group.
        trained: those of them that are trained.
        updates: the number of updates of the run, over which learning rates are scheduled.
        reading: the policies whose advantages read a critic's values.
        turns: the turns of the protocol.
        devices: the number of processes that train.
        strategy: how they hold the weights (:class:`maporl.integrations.ray.section.LearnerPlaces`).
        replicas: the number of processes that sample.
        rows: the most answers that one of them samples at a time. None: all that are asked for.
        args: the trainer's arguments, a :class:`maporl.MultiAgentPPOConfig` without devices (:func:`without_devices`).
        objectives: the functions that the policies' ``objective`` name, by name.
        stops: what ends the completions of each policy: token ids, and strings.
        seed: torch's seed, with which new adapters are drawn.
        past: for each policy that speaks with past weights of another one, the name of that one.
        vllm: the options of vLLM of each policy, if vLLM samples from the group. Otherwise transformers does.
    """

    name: str
    config: Config
    policies: tuple[str, ...]
    trained: tuple[str, ...]
    updates: int
    reading: tuple[str, ...]
    turns: int
    devices: int
    strategy: str
    replicas: int
    rows: int | None
    args: Any
    objectives: Mapping[str, Callable[..., Any]]
    stops: Mapping[str, tuple[frozenset[int], tuple[str, ...]]]
    seed: int
    past: Mapping[str, str] = field(default_factory=dict)
    vllm: Mapping[str, VLLMSection] = field(default_factory=dict)


def without_devices(args: Any) -> Any:
    """Return a copy of a trainer's arguments without what they have found out about this process and its devices."""
    copied = copy.copy(args)
    for name in ("_setup_devices", "distributed_state"):
        vars(copied).pop(name, None)
    return copied


# -- how the driver asks it --------------------------------------------------------------------------------------------


class MemberDied(RunError):
    """A process of a group has ended, or cannot be reached."""


class NoPlace(RunError):
    """The place of a process is lost, and no machine has another one."""


class Member(Protocol):
    """A process that answers calls one after the other."""

    name: str
    """What errors and logs call it, such as ``ann learner 0``."""

    @property
    def place(self) -> Hashable:
        """Its device. Processes of the same place share it, and work one at a time."""
        ...

    def call(self, method: str, *arguments: Any, kept: bool = False) -> Future[Any]:
        """Begin a call of a method, and return its result to come, or if it is ``kept`` elsewhere a handle of it.

        The future raises :class:`MemberDied` if the process ends before it has answered, and otherwise what the method
        raises.
        """
        ...

    def answers(self, seconds: float) -> bool:
        """Return whether the process says within ``seconds`` that it is there, although it may be busy with a call."""
        ...

    def stacks(self) -> str:
        """Return what every thread of the process is doing, although it may be busy with a call."""
        ...

    def end(self) -> None:
        """End the process at once."""
        ...


# -- its log and its stacks --------------------------------------------------------------------------------------------

LINES, LONGEST = 20, 300
"""How many lines of a log an error repeats, and how many characters of a line."""
CRASH = "Fatal Python error"
"""How Python begins what it says of a crash.

Where the crash was follows, and then more than :data:`LINES` lines may.
"""
_BEGINS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: .+ is process \d+")
"""The first line of a process. One that takes its place may print to the same file."""
_MOST = 2**16
"""The most bytes at the end of a log that are read for them."""


def log_of(folder: Path, name: str) -> Path:
    """Return the file that the process ``name`` of the run in ``folder`` prints to."""
    return below(folder / "logs", f"{name.replace(' ', '-')}.log")


def write_stacks(folder: Path, name: str, text: str) -> Path:
    """Write what a process that does not answer is doing into the folder of the run, under ``name``.

    Return the file.
    """
    file = below(folder / FOLDER, f"{name.replace(' ', '-')}.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def print_to(log: Path, name: str) -> None:
    """From now on, add what this process prints to ``log``, and where it is if it crashes. The first line names it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2, all_threads=False)
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {name} is process {os.getpid()}", flush=True)


def end_of(log: Path) -> str:
    """Return the last :data:`LINES` lines of a process's log for an error, or the first ones of a crash, or why it
    cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MOST))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"its log {log} cannot be read ({error.strerror})"
    lines = lines[max((n for n, line in enumerate(lines) if _BEGINS.fullmatch(line)), default=0) :]
    crashes = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
    chosen = lines[crashes[-1] :][:LINES] if crashes else lines[-LINES:]
    return "\n".join([f"the end of its log {log}:", *(f"  | {line[:LONGEST]}" for line in chosen)])
