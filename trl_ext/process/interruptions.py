"""Handle SIGTERM and Ctrl-C: the run saves a checkpoint and ends.

It says so, and its exit status is not that of a finished run.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trl_ext.process.waits import Discarded, dropped_by

TERMINATED = 143
"""The exit status of a run that SIGTERM has ended before its end: 128 and the signal's number, as shells count."""
TIDY = 3.0
"""The seconds in which a process ends in good order after its run was saved."""
_LAUNCHER = os.getppid() if "LOCAL_RANK" in os.environ else None
"""The process of ``torchrun``, ``accelerate launch`` or ``deepspeed``, if one of them has started this one."""
_LOOK = 1.0
"""The seconds after which a process looks whether its launcher is still there."""
_PATIENCE = b"the run ends as soon as its updates are saved; Ctrl-\\ ends it at once, and loses those after its last checkpoint\n"  # noqa: E501


class Terminated(SystemExit):
    """SIGTERM has ended the run before its end, and the run has been saved."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class Interrupted(KeyboardInterrupt):
    """The user pressed Ctrl-C, and the run has been saved."""


def leave_soon(status: int) -> None:
    """End the process with ``status`` after :data:`TIDY` seconds, if it does not end by itself. Its run is saved.

    The end of the interpreter waits for threads of libraries and of users, and closes their tools and servers. These
    may hang.
    """

    def leave() -> None:
        time.sleep(TIDY)
        os._exit(status)

    threading.Thread(target=leave, name="ends the process", daemon=True).start()


class Interruptions:
    """A context manager that records SIGTERM and SIGINT in ``asked`` instead of letting them end the process.

    In a block ``with interruptions.droppable():`` a signal raises :class:`trl_ext.process.waits.Discarded` at once,
    here and in the threads that work for the block. Such a block has not changed anything that cannot be done again.
    Elsewhere the signal waits for the end of the update. Only the main thread receives signals, so the context manager
    does nothing in other threads. The end of the launcher that has started this process counts as SIGTERM, because
    nobody else would end it.

    One may stand inside another, as a stage of a loop does. What the inner one has heard of, the outer one knows when
    the inner one ends, and what the outer one has heard of, the inner one knows from its beginning.

    Args:
        heard: is called once, in a thread of its own, when the first signal has come.
    """

    _innermost: "Interruptions | None" = None

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        self.asked = 0
        self.nothing_to_lose = False
        """Whether every update that was made is in a checkpoint. Only then a second Ctrl-C ends the process at once."""
        self._heard, self._signal, self._over = heard, threading.Event(), False
        self._drop = threading.Event()
        self._droppable = False
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._outer: Interruptions | None = None

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            self._outer, Interruptions._innermost = Interruptions._innermost, self
            # a handler cannot start a thread: it may have interrupted the start of one
            self._thread = threading.Thread(target=self._listen, name="hears of signals", daemon=True)
            self._thread.start()
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
            if self._outer is not None and self._outer.asked:
                self.asked = self._outer.asked
                self._signal.set()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over = True
        self._signal.set()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it is of another language
        if self._thread is not None:
            # it refers to what ``heard`` belongs to, perhaps as the last one. A thread that frees tensors while the
            # interpreter ends is killed in the middle, and torch ends the process for that
            self._thread.join(TIDY)
            Interruptions._innermost = self._outer
            if self._outer is not None and self.asked and not self._outer.asked:
                self._outer._hear(self.asked, raises=not any(error))

    @contextmanager
    def droppable(self, at_once: bool = True) -> Iterator[None]:
        """Let a signal drop what the block does.

        A signal that came before the block drops it before it begins, or, if not ``at_once``, where it first waits for
        something.

        Raises:
            Discarded: a signal has come.
        """
        outer, self._droppable = self._droppable, True
        try:
            if self.asked:
                self._drop.set()
            with dropped_by(self._drop, at_once):
                yield
        finally:
            self._droppable = outer

    @property
    def error(self) -> BaseException:
        """The exception with which a run ends that a signal has ended."""
        return Terminated() if self.asked == signal.SIGTERM else Interrupted()

    @property
    def name(self) -> str:
        """The name of the signal."""
        return signal.Signals(self.asked).name

    def _listen(self) -> None:
        while not self._signal.wait(_LOOK if _LAUNCHER else None):
            if _LAUNCHER and os.getppid() != _LAUNCHER:
                os.kill(os.getpid(), signal.SIGTERM)
        if not self._over:
            self._heard()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            if self.nothing_to_lose:
                raise KeyboardInterrupt
            os.write(2, _PATIENCE)  # the signal may have come in the middle of a print
        self._hear(self.asked or number)

    def _hear(self, number: int, raises: bool = True) -> None:
        self.asked = number
        self._signal.set()
        if self._droppable and not self._drop.is_set():
            self._drop.set()
            if raises:
                raise Discarded
