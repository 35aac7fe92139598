"""What the processes of a group spend their time on, added up between two records of metrics.

Imports no torch and no Ray.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
