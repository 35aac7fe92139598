"""Which rows wait for a process that samples, and which process works on which. Imports no torch and no Ray."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

Process = TypeVar("Process")


@dataclass
class Queued:
    """A request, its answer to come, and the version of the weights that a process was last asked to answer with."""

    request: TokenRequest
    answer: Future[Sampled]
    version: int = 0


class RowQueue(Generic[Process]):
    """Gives rows to processes that are free. Its owner calls it from one thread at a time.

    Args:
        rows: the most rows that a process works on at a time. None: all that wait.
        joining: whether a process takes new rows while it works on others, as vLLM does.
    """

    def __init__(self, rows: int | None, joining: bool):
        self.rows, self.joining = rows, joining
        self.waiting: list[Queued] = []
        self._free: list[Process] = []
        self._running: dict[Process, dict[int, Queued]] = {}
        """What each process was asked and has not answered, by number."""
        self._numbers = itertools.count()

    @property
    def all_busy(self) -> bool:
        """Return whether no process is free."""
        return not self._free

    def add(self, process: Process) -> None:
        """Add a process, which is free."""
        self._running[process] = {}
        self._free.append(process)

    def free(self, process: Process) -> None:
        """Say that a process may be given rows. One that was removed stays away."""
        if process in self._running:
            self._free.append(process)

    def remove(self, process: Process) -> None:
        """Remove a process. What it has not answered waits again, before everything else."""
        self.waiting[:0] = self._running.pop(process).values()
        self._free = [other for other in self._free if other is not process]

    def next(self) -> tuple[Process, dict[int, Queued], int] | None:
        """Return a process that is free no longer, its new rows by number, and how many rows it then works on.

        One that works on rows may get no new ones. None: nobody is free who has something to do.
        """
        for process in self._free:
            running, size = self._running[process], self._room(process)
            if size or running:
                self._free.remove(process)
                part, self.waiting = self.waiting[:size], self.waiting[size:]
                new = {next(self._numbers): queued for queued in part}
                running |= new
                return process, new, len(running)
        return None

    def answered(self, process: Process, answers: Mapping[int, Any]) -> list[tuple[Queued, Any]]:
        """Return the rows that a process has answered with their answers. Rows that it has lost are left out."""
        running = self._running.get(process, {})
        return [(running.pop(number), answer) for number, answer in answers.items() if number in running]

    def given_up(self, process: Process) -> Iterable[Queued]:
        """Return what a process was asked, and forget it."""
        running = self._running.get(process, {})
        left = list(running.values())
        running.clear()
        return left

    def _room(self, process: Process) -> int:
        """Return how many waiting rows a free process takes."""
        # free processes share what waits; where rows join others, all processes share what waits and what runs
        sharing: Sequence[Process] = list(self._running) if self.joining else self._free
        running = sum(len(self._running[other]) for other in sharing)
        size = math.ceil((len(self.waiting) + running) / len(sharing))
        size = size if self.rows is None else min(size, self.rows)
        return min(max(size - len(self._running[process]), 0), len(self.waiting))
