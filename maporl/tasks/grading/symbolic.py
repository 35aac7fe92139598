"""Symbolic comparison in a process of its own, because no limit inside this process stops sympy in every thread.

The process (:mod:`maporl.tasks.grading.symbolic_worker`) starts with the first comparison and stays. Each comparison has
a limit of CPU time, which the kernel enforces, so that a busy machine changes no outcome. Threads share the process and
take turns. A fork of this process starts its own.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from maporl.errors import UserError

SECONDS = 0.8
"""The CPU time for the symbolic work of one grade. Of the benchmarks' answers the slowest right one takes 0.24 s, and the
slowest wrong one 0.58 s."""
_ANSWER_SECONDS = 60.0
"""The process has so long on the clock to start or to answer. Only one that was stopped from outside takes longer."""
_WORKER = Path(__file__).with_name("symbolic_worker.py")
_STARTED_BY = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "runpy.run_path(sys.argv[2])['main'](int(sys.argv[3]))"
)


class MathematicsError(UserError, RuntimeError):
    """The process that compares mathematics cannot work here. No text that is graded can cause it."""


class _Lost(Exception):
    """The process ended, or does not answer."""


@dataclass
class Allowance:
    """The CPU ``seconds`` that the symbolic work of one grade may still take."""

    seconds: float = SECONDS


class Comparer:
    """Owns the process, and asks it. ``process`` is None before the first comparison and after :meth:`close`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.connection: Connection | None = None
        self._lock = threading.Lock()

    def equal(self, gold: str, answer: str | None, allowance: Allowance) -> bool | None:
        """Whether two texts in math-verify's form are equal, as :func:`equal` says.

        Raises:
            MathematicsError: the process does not start, or twice it was killed from outside or did not answer.
        """
        if allowance.seconds <= 0:
            return False
        request = json.dumps({"gold": gold, "answer": answer, "seconds": allowance.seconds}).encode()
        with self._lock:
            for _ in range(2):  # somebody else may have killed the process, which says nothing about these texts
                try:
                    return self._exchange(request, allowance)
                except _Lost:
                    self.close()
                except BaseException:  # an interrupted exchange would leave its answer to the next pair
                    self.close()
                    raise
        raise MathematicsError(
            f"the process that compares mathematics was lost twice at {gold!r:.100} and {answer!r:.100}: it was killed from "
            f"outside, or it did not start or answer within {_ANSWER_SECONDS:g} s; see whether memory is short, and whether "
            f"'{sys.executable} -c \"import math_verify\"' works"
        )

    def close(self) -> None:
        """End the process and all that it started; the next comparison starts a new one."""
        process, self.process = self.process, None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def abandon(self) -> None:
        """In a fork: leave the process to the parent, which sees it end only if no fork holds its connection."""
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.returncode = 0  # the parent waits for it, and this fork cannot

    def _exchange(self, request: bytes, allowance: Allowance) -> bool | None:
        connection = self._running()
        try:
            connection.send_bytes(request)
        except OSError as error:
            raise _Lost from error
        readable = False
        while True:
            word, seconds = _received(connection)
            if word == "readable":
                readable = True
                continue
            allowance.seconds = 0.0 if word == "ended" else allowance.seconds - seconds
            return word == "equal" if readable else None

    def _running(self) -> Connection:
        """The connection to the process, which is started if it is not there. What it says unasked ends it."""
        if self.connection is not None and self.connection.poll():
            self.close()
        if self.connection is None:
            self._start()
        assert self.connection is not None
        return self.connection

    def _start(self) -> None:
        if find_spec("resource") is None:
            raise MathematicsError(
                f"comparing mathematics needs a process that can be forked and limited, which {sys.platform} lacks; use "
                "Linux or macOS, or a task whose labels and answers are numbers"
            )
        paths = json.dumps([str(path) for path in sys.path])
        try:
            self.connection, theirs = Pipe()
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _STARTED_BY, paths, str(_WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
        except OSError as error:
            raise MathematicsError(f"the process that compares mathematics does not start: {error}") from error
        word, why = _received(self.connection)
        if word != "ready":
            raise MathematicsError(f"the process that compares mathematics cannot load math-verify: {why}")


def _received(connection: Connection) -> tuple[str, float]:
    """The next word of the process, and the seconds that the work took or what else it says."""
    try:
        if not connection.poll(_ANSWER_SECONDS):
            raise _Lost
        word, said = json.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise _Lost from error
    return word, said


_comparer = Comparer()


def equal(gold: str, answer: str | None, allowance: Allowance | None = None) -> bool | None:
    """Whether two texts are equal as mathematics, by math-verify; None if the label ``gold`` cannot be read.

    Without an ``answer`` it only says whether the label can be read: False if so. A label whose reading uses up the
    allowance cannot be read. An answer whose reading or comparing uses it up is different from the label.

    Raises:
        MathematicsError: the process does not start, or twice it was killed from outside or did not answer.
    """
    return _comparer.equal(gold, answer, allowance or Allowance())


def _forked() -> None:
    global _comparer
    _comparer.abandon()
    _comparer = Comparer()  # another thread may have held the lock when the process forked


def _leave() -> None:
    _comparer.close()


if find_spec("resource") is not None:  # elsewhere no process forks
    os.register_at_fork(after_in_child=_forked)
atexit.register(_leave)
