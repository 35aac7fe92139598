"""Waiting for others: servers, processes, threads, locks. A run that must end stops waiting for them. Imports no torch.

A signal reaches the main thread alone. What waits in another thread, perhaps for a server that never answers again,
does not hear of it. So a thread knows for whom it works, and every wait asks now and then whether that one still wants
the result:

- A block ``with dropped_by(event):`` is dropped when ``event`` is set, in this thread and in all that work for it.
- :class:`Threads` are dropped when their owner gives them up, for example because one of them has failed.

What is dropped raises :class:`Discarded` from its next wait, at most :data:`SLICE` seconds later. Nobody waits for the
threads of :class:`Threads`, not even the end of the interpreter, because one of them may be in code that knows nothing
of this.

``tests/trl_ext/process/test_waits.py`` lists everything in the project that waits, and names the few places that do so
otherwise.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ALL_COMPLETED as ALL_COMPLETED
from concurrent.futures import FIRST_COMPLETED as FIRST_COMPLETED
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Value = TypeVar("Value")
SLICE = 0.2
"""The seconds after which a wait asks whether its result is still wanted."""


class Discarded(BaseException):
    """What this thread works on is dropped, because the run must end, or because the one for whom it works has failed.

    This is not an ``Exception``. It is raised wherever a thread waits or a signal arrives, and libraries catch
    exceptions: Jinja does so in the middle of a chat template.
    """


class _Wanted(threading.local):
    """What drops the work of a thread."""

    events: tuple[threading.Event, ...] = ()


_HERE = _Wanted()


@contextmanager
def dropped_by(event: threading.Event, at_once: bool = True) -> Iterator[None]:
    """Let ``event`` drop what the block does, in this thread and in those that work for it.

    If not ``at_once``, the block begins even if the event is set.

    Raises:
        Discarded: the event is set, now or when the block waits.
    """
    before = _HERE.events
    _HERE.events = (*before, event)
    try:
        if at_once:
            check()
        yield
    finally:
        _HERE.events = before


def check() -> None:
    """Go on if the work of this thread is still wanted.

    Raises:
        Discarded: it is not.
    """
    for event in _HERE.events:
        if event.is_set():
            raise Discarded


def until(happens: Callable[[float], Value], seconds: float | None = None) -> Value:
    """Call ``happens(seconds)`` again and again, until it returns something true or ``seconds`` are over. Return its
    last value.

    ``happens`` waits for at most the seconds that it is given. It is called at least once.

    Raises:
        Discarded: the work of this thread is not wanted any more.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        check()
        left = SLICE if end is None else max(0.0, min(SLICE, end - time.monotonic()))
        if (value := happens(left)) or (end is not None and time.monotonic() >= end):
            return value


def pause(seconds: float) -> None:
    """Sleep for ``seconds``."""
    until(time.sleep, seconds)


def finished(
    futures: Collection[Future[Any]], seconds: float | None = None, when: str = ALL_COMPLETED
) -> set[Future[Any]]:
    """Wait as :func:`concurrent.futures.wait` does, and return the futures that are done."""
    done: set[Future[Any]] = set()

    def happens(left: float) -> bool:
        nonlocal done
        done, waiting = wait_for_futures(futures, left, when)
        raised = any(not one.cancelled() and one.exception() is not None for one in done)
        return not waiting or (bool(done) and when == FIRST_COMPLETED) or (raised and when != ALL_COMPLETED)

    until(happens, seconds)
    return done


def result(future: Future[Value], seconds: float | None = None) -> Value:
    """Return the result of ``future``, for which this waits.

    Raises:
        TimeoutError: it took longer than ``seconds``.
        Discarded: the work of this thread is not wanted any more.
    """
    finished([future], seconds)
    return future.result(0)


def taken(items: "queue.Queue[Value] | queue.SimpleQueue[Value]", seconds: float | None = None) -> Value:
    """Return the next of ``items``, for which this waits.

    Raises:
        queue.Empty: none came within ``seconds``.
        Discarded: the work of this thread is not wanted any more.
    """
    received: list[Value] = []

    def happens(left: float) -> bool:
        with suppress(queue.Empty):
            received.append(items.get(timeout=left))
        return bool(received)

    if not until(happens, seconds):
        raise queue.Empty
    return received[0]


class Threads:
    """At most ``most`` threads that work for the one who has made them. They start when they are needed.

    As a context manager it gives them up if the block fails, so that none of them goes on for nobody::

        with Threads(4) as threads:
            asked = [threads.submit(ask, server) for server in servers]
            answers = [result(one) for one in asked]

    Args:
        most: the most threads.
        name: what stacks call them.
        for_all: whether they work for everybody, so that what is submitted is done although the one who submits it is
            dropped.
    """

    def __init__(self, most: int, name: str = "works for the process", for_all: bool = False):
        self.most, self.name, self.for_all = max(1, most), name, for_all
        self._given_up = threading.Event()
        self._work: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._started = 0
        self._end = weakref.finalize(self, self._work.put, None)

    def submit(self, function: Callable[..., Value], *arguments: Any) -> Future[Value]:
        """Begin to call ``function``, for the thread that calls this. Return its result to come."""
        future: Future[Value] = Future()
        events = () if self.for_all else _HERE.events
        self._work.put(_Task(future, function, arguments, (*events, self._given_up)))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                number, self._started = self._started, min(self._started + 1, self.most)
            if number < self.most:
                name = f"{self.name} {number}"
                threading.Thread(target=_serve, args=(self._work, self._idle), name=name, daemon=True).start()
        return future

    def give_up(self) -> None:
        """Drop what they work on, and what they have not begun. Do not wait for it."""
        self._given_up.set()
        self.close()

    def close(self) -> None:
        """Let them end when they have done what was submitted. Do not wait for it."""
        self._end()

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._given_up.set()
        self.close()


class _Task:
    """A call in another thread, for the one that has submitted it."""

    def __init__(
        self, future: Future[Any], function: Callable[..., Any], arguments: tuple, events: tuple[threading.Event, ...]
    ):
        self.future, self.function, self.arguments, self.events = future, function, arguments, events

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        _HERE.events = self.events
        try:
            check()
            function, arguments = self.function, self.arguments
            # who waits for the result may then end the process, and must not leave it to this thread to free tensors
            del self.function, self.arguments
            value = function(*arguments)
            del function, arguments
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)
        finally:
            _HERE.events = ()


def _serve(work: "queue.SimpleQueue[_Task | None]", idle: threading.Semaphore) -> None:
    """Do what is in the queue until its end, which is None, and leave that to the other threads."""
    while True:
        try:
            task = work.get_nowait()
        except queue.Empty:
            idle.release()
            task = work.get()
        if task is None:
            work.put(None)
            return
        task.run()
        del task  # what it refers to need not live until the next one
