"""Handle SIGTERM and Ctrl-C: the run saves a checkpoint and ends. A second Ctrl-C ends it at once, without saving."""

import signal
import threading
from types import FrameType
from typing import Any


class Discarded(BaseException):
    """The update in progress was dropped before it changed anything, because the run must end.

    This is not an ``Exception``. It is raised wherever the signal arrives, and libraries catch exceptions: Jinja does
    so in the middle of a chat template.
    """


class Interrupted(KeyboardInterrupt):
    """The user pressed Ctrl-C, and the run has been saved."""


class Interruptions:
    """A context manager that records SIGTERM and SIGINT in ``asked`` instead of letting them end the process.

    While ``droppable`` is true, a signal raises :class:`Discarded` at once. The caller sets ``droppable`` while its
    work has not changed anything yet. Only the main thread receives signals, so the context manager does nothing in
    other threads.
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
