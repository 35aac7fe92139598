"""Threads that play dialogues with one set of tools, environments and reward sources. Imports no torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GivenUp(Exception):
    """Nobody will read the dialogues that a thread plays, so that it ends."""


class Interleaving:
    """Lets one thread run at a time, while the others wait for answers.

    A thread runs from one wait to the next, as a coroutine does. So what the threads share needs no locks of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._inside: dict[int, threading.Event | None] = {}

    @property
    def others(self) -> int:
        """The number of other threads that are in :meth:`running`."""
        return len(self._inside.keys() - {threading.get_ident()})

    @contextmanager
    def running(self, given_up: threading.Event | None = None) -> Iterator[None]:
        """Run while no other thread runs. Inside itself this does nothing.

        ``given_up``: when it is set, the thread ends after its next wait.
        """
        own = threading.get_ident()
        if self._owner == own:
            yield
            return
        self._take()
        self._inside[own] = given_up
        try:
            yield
        finally:
            del self._inside[own]
            self._give()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let other threads run while this one waits. Outside of :meth:`running` this does nothing.

        Raises:
            GivenUp: nobody will read what the thread plays.
        """
        own = threading.get_ident()
        if self._owner != own:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()
        given_up = self._inside[own]
        if given_up is not None and given_up.is_set():
            raise GivenUp

    def _take(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def _give(self) -> None:
        self._owner = None
        self._lock.release()
