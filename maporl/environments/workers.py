"""Runs calls of tools at the same time, each with a time-out. Imports no torch.

Python cannot end a thread. A thread whose call took too long is left behind, and another one takes its place. Its
result is dropped when it comes.
"""

import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from maporl.errors import UserError
from maporl.event_loop import Loop
from trl_ext.process.waits import taken

MOST = 32
"""The most calls that run at the same time."""
MOST_LEFT = 8
"""The number of threads left behind at which a run stops, because each of them may keep a core and memory. The thread
of an event loop that a coroutine blocks is one of them."""


class TooManyLeft(UserError, RuntimeError):
    """Several calls took too long and cannot be ended."""


@dataclass(frozen=True)
class Job:
    """One call.

    Args:
        run: the function.
        seconds: the most seconds that it may take.
        name: its name in errors.
    """

    run: Callable[[], Any]
    seconds: float
    name: str


@dataclass
class Outcome:
    """The outcome of a :class:`Job`: its value, its exception, or neither if it took too long.

    ``started`` is False if an earlier call of its row took too long, so that it was not begun.
    """

    value: Any = None
    error: BaseException | None = None
    late: bool = False
    started: bool = True
    seconds: float = 0.0


class Workers:
    """Threads and one event loop, which are started when they are first needed. ``most`` calls run at the same time."""

    def __init__(self, most: int = MOST):
        self.most = most
        self._left = 0
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._threads = 0
        self._loop = Loop("maporl tool loop")

    @property
    def left(self) -> int:
        """How many threads were left behind."""
        return self._left + self._loop.left

    def run(self, rows: Sequence[Sequence[Job]]) -> list[list[Outcome]]:
        """Run all jobs, and return their outcomes in the order of the jobs.

        The jobs of a row run one after the other, and rows at the same time. After a job that took too long, the rest
        of its row is not begun.

        Raises:
            TooManyLeft: too many calls took too long and cannot be ended.
            KeyboardInterrupt: a job raised it.
        """
        running = [_Row(row) for row in rows]
        waiting = [row for row in running if row.jobs]
        begun: list[_Row] = []
        done: queue.SimpleQueue[_Row] = queue.SimpleQueue()
        try:
            while waiting or begun:
                while waiting and len(begun) < self.most:
                    row = waiting.pop(0)
                    begun.append(row)
                    self._start(row, done)
                for row in self._wait(begun, done):
                    begun.remove(row)
                    self._check_left(row)
        except BaseException:  # a signal ends the run, whose tools and environments need threads to be closed
            for row in begun:
                self._leave(row)
            raise
        return [row.outcomes for row in running]

    def close(self) -> None:
        """End the threads that wait for work. A later call starts others."""
        for _ in range(self._threads):
            self._jobs.put(lambda: False)
        self._threads = 0

    def _start(self, row: "_Row", done: "queue.SimpleQueue[_Row]") -> None:
        self._jobs.put(lambda: self._work(row, done))
        if self._threads < self.most:
            self._threads += 1
            threading.Thread(target=_serve, args=(self._jobs,), name="maporl tool", daemon=True).start()

    def __del__(self) -> None:
        self.close()

    def _work(self, row: "_Row", done: "queue.SimpleQueue[_Row]") -> bool:
        """Run the jobs of a row in this thread. Return whether the thread is still wanted."""
        for number, job in enumerate(row.jobs):
            if row.dropped:  # before its turn came
                self._left -= 1
                return False
            row.number, row.since = number, time.monotonic()
            outcome = self._outcome(job)
            outcome.seconds = time.monotonic() - row.since
            if row.dropped:  # another thread has taken the place of this one
                self._left -= 1
                return False
            row.outcomes[number] = outcome
            if outcome.late:
                break
        done.put(row)
        return True

    def _outcome(self, job: Job) -> Outcome:
        try:
            value = job.run()
            if inspect.isawaitable(value):
                return self._awaited(value, job.seconds)
            return Outcome(value)
        except (
            BaseException
        ) as error:  # even SystemExit of a tool is told to the agent; what to do is decided by the caller
            return Outcome(error=error)

    def _awaited(self, value: Any, seconds: float) -> Outcome:
        """Await a coroutine in the event loop. It is cancelled if it takes too long."""
        began = time.monotonic()
        try:
            return Outcome(self._loop.wait(value, seconds))
        except TimeoutError as error:  # the tool's own, if it came before its time was up
            return Outcome(late=True) if time.monotonic() - began >= seconds else Outcome(error=error)

    def _wait(self, begun: "list[_Row]", done: "queue.SimpleQueue[_Row]") -> "list[_Row]":
        """Wait for a row that is done, or whose job takes too long. Return those rows."""
        soonest = min(row.left() for row in begun)
        try:
            return [taken(done, max(0.0, min(soonest, 1.0)))]
        except queue.Empty:
            late = [row for row in begun if row.left() <= 0]
        for row in late:
            row.outcomes[row.number] = Outcome(late=True, seconds=row.jobs[row.number].seconds)
            self._leave(row)
        return late

    def _leave(self, row: "_Row") -> None:
        """Wait no longer for the thread of a row. Another one may take its place."""
        if not row.dropped:
            row.dropped = True
            self._left += 1
            self._threads -= 1

    def _check_left(self, row: "_Row") -> None:
        if self.left >= MOST_LEFT and row.outcomes[row.number].late:
            raise TooManyLeft(
                f"{row.jobs[row.number].name}: {self.left} calls took longer than they may and cannot be ended, the "
                f"last one {row.jobs[row.number].seconds:g} s; give it a time-out of its own, or more seconds"
            )


def _serve(jobs: "queue.SimpleQueue[Callable[[], bool]]") -> None:
    """Do jobs until one says that the thread is not wanted. A thread that waits for work keeps nobody's tools."""
    while jobs.get()():
        pass


class _Row:
    """Jobs that run one after the other."""

    def __init__(self, jobs: Sequence[Job]):
        self.jobs = list(jobs)
        self.outcomes = [Outcome(started=False) for _ in jobs]
        self.number, self.dropped = 0, False
        self.since: float | None = None

    def left(self) -> float:
        """Return the seconds that the present job may still take."""
        grace = 0.5  # a coroutine is cancelled by its own thread first
        return 1.0 if self.since is None else self.since + self.jobs[self.number].seconds + grace - time.monotonic()
