"""Threads that play dialogues with one set of tools, environments and reward sources. Imports no torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trl_ext.process.waits import SLICE, Discarded, check, until


class Interleaving:
    """Lets one thread run at a time, while the others wait for answers.

    A thread runs from one wait to the next, as a coroutine does. So what the threads share needs no locks of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._inside: set[int] = set()

    @property
    def others(self) -> int:
        """The number of other threads that are in :meth:`running`."""
        return len(self._inside - {threading.get_ident()})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run while no other thread runs. Inside itself this does nothing.

        Raises:
            Discarded: nobody wants any more what the thread does.
        """
        thread = threading.get_ident()
        if self._owner == thread:
            yield
            return
        until(lambda seconds: self._take(seconds))
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)
            self._give()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let other threads run while this one waits. Outside of :meth:`running` this does nothing.

        Raises:
            Discarded: nobody wants any more what the thread does.
        """
        thread = threading.get_ident()
        if self._owner != thread:
            yield
            return
        self._give()
        try:
            yield
        except Discarded:
            self._take(SLICE)  # whoever runs may be in a call that takes its time, and this thread only ends
            raise
        except BaseException:
            until(lambda seconds: self._take(seconds))
            raise
        until(lambda seconds: self._take(seconds))
        check()

    def _take(self, seconds: float) -> bool:
        taken = self._lock.acquire(timeout=seconds)
        if taken:
            self._owner = threading.get_ident()
        return taken

    def _give(self) -> None:
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()
