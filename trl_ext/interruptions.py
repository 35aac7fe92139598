"""SIGTERM and Ctrl-C: a run saves and ends. A second Ctrl-C ends it at once, without saving."""

import signal
import threading
from types import FrameType
from typing import Any


class Discarded(BaseException):
    """The update in progress was dropped before it changed anything, because the run is to end.

    No ``Exception``: it is raised wherever the signal comes, and libraries catch those (Jinja, in the middle of a chat template).
    """


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run was saved."""


class Interruptions:
    """While entered, notes SIGTERM and SIGINT in ``asked`` instead of letting them end the process.

    While ``droppable``, which says that the work in progress has changed nothing yet, :class:`Discarded` is raised at once.
    In threads, which get no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.droppable = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = number
        if self.droppable:
            self.droppable = False
            raise Discarded
