"""Event loops of a process, each in a thread of its own, for coroutines of users and of libraries. Imports no torch.

What one coroutine opens, such as a connection, others can use only in the same loop. So a loop is shared, and no
coroutine may end it for the others: what one raises goes to whoever waits for it, a loop that is stopped is started
again, and one that is blocked by code that does not give way is left alone while a new one takes its place.
"""

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trl_ext.process.waits import check, result

Value = TypeVar("Value")
PATIENCE = 0.25
"""Seconds in which a loop answers, unless a coroutine blocks it."""
LONGEST = 5.0
"""Seconds without an answer after which a loop counts as blocked whatever it does."""


@dataclass(eq=False)
class _Thread:
    """A thread that runs an event loop, and runs it again if a coroutine ends it, until it is told to end."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    ended: bool = False

    def serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self.ended:
            try:
                self.loop.run_forever()
            except BaseException:  # a task that a coroutine began by itself tried to end the thread
                continue
        self.loop.close()

    def stop_when_idle(self) -> None:
        """End once nothing runs here any more."""
        self.ended = not asyncio.all_tasks(self.loop)
        if self.ended:
            self.loop.stop()
        else:
            self.loop.call_later(1.0, self.stop_when_idle)


class _Task:
    """A coroutine that waits to be begun in a loop. It is begun once, by whichever loop comes first to it."""

    def __init__(self, coroutine: Awaitable[Any]):
        self.coroutine = coroutine
        self.done: Future[Any] = Future()
        self.begun = threading.Event()
        self._claim = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin, in the thread of ``loop``."""
        if self._claim.acquire(blocking=False):
            self._loop, self._task = loop, loop.create_task(self._run())
            self.begun.set()

    def give_up(self) -> None:
        """Cancel it, or see that it never begins."""
        if self._claim.acquire(blocking=False):
            if inspect.iscoroutine(self.coroutine):
                self.coroutine.close()
        elif self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> None:
        try:
            value = await self.coroutine
        except BaseException as error:  # even SystemExit, which would end the loop, is for whoever waits
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                self.done.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self.done.set_result(value)


class Loop:
    """An event loop that outlives what runs in it.

    Args:
        name: the name of its thread.
        replaceable: whether another loop takes the place of one that is blocked. What connections belong to is not:
            they would be lost, and nothing but code of this package runs beside them.
    """

    def __init__(self, name: str, replaceable: bool = True):
        self.name, self.replaceable = name, replaceable
        self.left = 0
        """How many loops were left behind that are still blocked."""
        self._lock = threading.Lock()
        self._running: _Thread | None = None
        self._suspected = False

    def wait(self, coroutine: Awaitable[Value], seconds: float | None = None) -> Value:
        """Return what a coroutine, or another awaitable, returns, from a thread without this loop.

        Raises:
            TimeoutError: it took longer than ``seconds``, and was cancelled.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        task = _Task(coroutine)
        thread = self._submit(task)
        while not task.begun.wait(_left(deadline, PATIENCE)):
            if _left(deadline, PATIENCE) == 0:
                break
            thread = self._submit(task) if self._replaced_if_blocked(thread) else thread
            check()
        try:
            return result(task.done, None if deadline is None else _left(deadline, float("inf")))
        except TimeoutError:
            if task.done.done():  # its own
                raise
            task.give_up()
            self._replaced_if_blocked(thread)
            raise
        except BaseException:
            if not task.done.done():  # a signal ends the run
                task.give_up()
            raise

    async def inside(self, coroutine: Awaitable[Value]) -> Value:
        """Return what a coroutine returns in this loop, from another loop. It is cancelled if the caller is."""
        if self._suspected and self._running is not None:
            await asyncio.to_thread(self._replaced_if_blocked, self._running)
        task = _Task(coroutine)
        self._submit(task)
        try:
            return await asyncio.wrap_future(task.done)
        except asyncio.CancelledError:
            task.give_up()
            self._suspected = True  # perhaps it is late because it blocks the loop
            raise

    def _submit(self, task: _Task) -> _Thread:
        with self._lock:
            if self._running is None:
                self._running = _Thread()
                threading.Thread(target=self._running.serve, name=self.name, daemon=True).start()
            self._running.loop.call_soon_threadsafe(task.begin, self._running.loop)
            return self._running

    def _replaced_if_blocked(self, thread: _Thread) -> bool:
        """Return whether another loop takes the place of that of ``thread``, because this one is blocked."""
        if self._running is not thread:
            return True
        if not self.replaceable:
            return False
        answered = threading.Event()
        thread.loop.call_soon_threadsafe(answered.set)
        if not answered.wait(PATIENCE) and asyncio.current_task(thread.loop) is None:
            answered.wait(LONGEST - PATIENCE)  # it is between two steps, so that the machine may be busy
        self._suspected = False
        if answered.is_set():
            return False
        with self._lock:
            if self._running is thread:
                self._running, self.left = None, self.left + 1
                thread.loop.call_soon_threadsafe(self._came_back, thread)
        return True

    def _came_back(self, thread: _Thread) -> None:
        """Let a loop that was left behind end, once nothing runs in it any more."""
        with self._lock:
            self.left -= 1
        thread.stop_when_idle()


def _left(deadline: float | None, most: float) -> float:
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


OWN_CODE, CONNECTIONS, HTTP = "maporl adapters", "maporl connections", "maporl-http"
"""The loop of coroutines that users wrote, that of connections of libraries, and that of this package's own requests.

None of the first can block those of the others.
"""
_LOOPS: dict[tuple[int, str], Loop] = {}
_LOCK = threading.Lock()


def event_loop(name: str = OWN_CODE) -> Loop:
    """Return a loop of this process, which is started when it is first used. A forked process gets its own."""
    with _LOCK:
        return _LOOPS.setdefault((os.getpid(), name), Loop(name, replaceable=name != HTTP))


def wait(coroutine: Awaitable[Value], seconds: float | None = None, loop: str = OWN_CODE) -> Value:
    """Return what a coroutine returns, from a thread without this loop.

    Raises:
        TimeoutError: it took longer than ``seconds``, and was cancelled.
    """
    return event_loop(loop).wait(coroutine, seconds)


def awaited(value: Any) -> Any:
    """Return ``value`` of code that may be a coroutine: what it returns if so, and else ``value`` itself."""
    return wait(value) if inspect.isawaitable(value) else value


async def inside(coroutine: Awaitable[Value], loop: str = OWN_CODE) -> Value:
    """Return what a coroutine returns in this loop, from another loop. It is cancelled if the caller is."""
    return await event_loop(loop).inside(coroutine)
