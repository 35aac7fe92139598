"""Which process works on what: turns on shared devices, rows for those that sample, and the time that work takes.

Imports no torch and no Ray.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trl_ext.process.waits import Threads, result
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

# -- devices -----------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")


class Turns:
    """Turns on shared devices, first come first served. A request gets all devices that it needs at the same moment.

    So nobody holds a device while it waits for another one, and everybody's turn comes if everybody's work ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[Hashable] = set()
        self._waiting: list[tuple[frozenset[Hashable], Future[None]]] = []
        # who gives devices back may hold locks that the next one wants
        self._telling = Threads(1, "turns", for_all=True)

    def ask(self, devices: Collection[Hashable]) -> Future[None]:
        """Ask for devices. The future is done when they are free; whoever asked must then :meth:`give` them back."""
        asked: Future[None] = Future()
        with self._lock:
            self._waiting.append((frozenset(devices), asked))
            free = asked in self._next()
        if free:
            asked.set_result(None)
        return asked

    def give(self, devices: Collection[Hashable]) -> None:
        """Give devices back, so that the next ones who asked can work."""
        with self._lock:
            self._busy -= set(devices)
            begun = self._next()
        for asked in begun:
            self._telling.submit(asked.set_result, None)

    def wait(self, devices: Collection[Hashable]) -> None:
        """Ask for devices, and wait until they are free.

        Whoever waits no longer, because of an error, does not get them.
        """
        asked = self.ask(devices)
        try:
            result(asked)
        except BaseException:
            with self._lock:
                waiting = [entry for entry in self._waiting if entry[1] is not asked]
                granted, self._waiting = len(waiting) == len(self._waiting), waiting
            self.give(devices if granted else ())
            raise

    def run(self, devices: Collection[Hashable], begin: Callable[[], Future[Result]]) -> Future[Result]:
        """Call ``begin`` when the devices are free, and give them back when what it returns is done.

        Return its result to come.
        """
        result: Future[Result] = Future()

        def work(_: Future[None]) -> None:
            try:
                call = begin()
            except BaseException as error:  # an error of a callback would be logged only
                self.give(devices)
                result.set_exception(error)
            else:
                call.add_done_callback(settle)

        def settle(done: Future[Result]) -> None:
            self.give(devices)
            error = done.exception()
            if error is None:
                result.set_result(done.result())
            else:
                result.set_exception(error)

        self.ask(devices).add_done_callback(work)
        return result

    @contextmanager
    def taken(self, devices: Collection[Hashable]) -> Iterator[None]:
        """Wait until the devices are free, and hold them in the context."""
        self.wait(devices)
        try:
            yield
        finally:
            self.give(devices)

    def _next(self) -> list[Future[None]]:
        """Take those from the list whose devices are free and whom nobody goes before. The lock is held."""
        begun, left = [], []
        wanted = set(self._busy)
        for devices, asked in self._waiting:
            if wanted.isdisjoint(devices):
                self._busy |= devices
                begun.append(asked)
            else:
                left.append((devices, asked))
            wanted |= devices  # who asked later does not go before
        self._waiting = left
        return begun


# -- rows --------------------------------------------------------------------------------------------------------------

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


# -- time --------------------------------------------------------------------------------------------------------------

LEARNING, SAMPLING, SENDING, SAVING, DEAD, IDLE = "learning", "sampling", "sending", "saving", "dead", "idle"
"""What a process does. ``dead``: another one must take its place. ``idle``: it has nothing to do."""
Clock = Callable[[], float]


class Activity:
    """The time that processes spend on each kind of work, as a mean over them.

    Args:
        processes: how many there should be. Those that are not there count as dead.
        clock: returns the time in seconds.
    """

    def __init__(self, processes: int, clock: Clock = time.monotonic):
        self.processes, self._clock = processes, clock
        self._lock = threading.Lock()
        self._doing: dict[Any, list[str]] = {}
        """By process what it has begun and not ended. Its time counts for the last of them."""
        self._spent: dict[str, float] = {}
        self._until = clock()

    def start(self, process: Any) -> None:
        """From now on ``process`` is there, and idle."""
        with self._lock:
            self._add_up()
            self._doing[process] = []

    def gone(self, process: Any) -> None:
        """From now on ``process`` is dead."""
        with self._lock:
            self._add_up()
            self._doing.pop(process, None)

    def begin(self, process: Any, what: str) -> None:
        """From now on ``process`` does ``what``, unless it is gone."""
        with self._lock:
            self._add_up()
            if process in self._doing:
                self._doing[process].append(what)

    def end(self, process: Any, what: str) -> None:
        """The ``process`` has done ``what``, unless it is gone."""
        with self._lock:
            self._add_up()
            if process in self._doing:
                self._doing[process].remove(what)

    @contextmanager
    def doing(self, process: Any, what: str) -> Iterator[None]:
        """While the block runs, ``process`` does ``what``."""
        self.begin(process, what)
        try:
            yield
        finally:
            self.end(process, what)

    def take(self) -> dict[str, float]:
        """Return the seconds of each kind of work since the last time, as a mean over the processes.

        They add up to the time that has passed.
        """
        with self._lock:
            self._add_up()
            spent, self._spent = self._spent, {}
        return {what: seconds / self.processes for what, seconds in spent.items()}

    def _add_up(self) -> None:
        now = self._clock()
        passed, self._until = now - self._until, now
        doing = [begun[-1] if begun else IDLE for begun in self._doing.values()]
        for what in [*doing, *[DEAD] * (self.processes - len(doing))]:
            self._spent[what] = self._spent.get(what, 0.0) + passed


def shown(spent: dict[str, float], kinds: tuple[str, ...]) -> dict[str, float]:
    """Return the seconds of each of ``kinds`` in what :meth:`Activity.take` returned, and the fraction that was
    idle."""
    whole = sum(spent.values())
    idle = spent.get(IDLE, 0.0) / whole if whole else 0.0
    return {**{what: spent.get(what, 0.0) for what in kinds}, IDLE: idle}
