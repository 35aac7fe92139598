"""Devices that several processes share: one of them works at a time. Imports no torch and no Ray."""

import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from trl_ext.process.waits import Threads, result

Result = TypeVar("Result")


class Turns:
    """Who works on which device. Whoever asks first is first, and has all devices that it needs at the same moment.

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
