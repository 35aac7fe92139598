"""Child processes that answer requests and can be killed: the owner's side, and the frames that both sides speak.
Imports no torch.

A process that may hang, crash or be misled by what it reads is a servant of this one. It has one end of a socket as its
standard input, and what it prints goes where this process writes its errors. It ends with its owner, however the owner
ends: its reads then come to an end. A frame is four bytes of length, the highest first, and so many bytes.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trl_ext.process.waits import until

_PIECE = 2**20
"""Most bytes that one call reads."""


class Lost(Exception):
    """The process ended ("killed") or did not answer in time ("timeout"); the message is one of the two words."""


def framed(body: bytes) -> bytes:
    """Return ``body`` as one frame.

    >>> framed(b"{}")
    b'\\x00\\x00\\x00\\x02{}'
    """
    return len(body).to_bytes(4, "big") + body


def send(end: socket.socket, body: bytes, deadline: float | None = None) -> None:
    """Send ``body`` as one frame. ``deadline`` is a time of the monotonic clock.

    Raises:
        Lost: the other side is gone, or does not read in time.
        Discarded: the work of this thread is not wanted any more.
    """
    left = memoryview(framed(body))
    while left:
        _wait(end, select.POLLOUT, deadline)
        try:
            left = left[end.send(left, socket.MSG_DONTWAIT) :]
        except BlockingIOError:  # there is room for fewer bytes than the kernel takes at once
            continue
        except OSError:
            raise Lost("killed") from None


def receive(end: socket.socket, deadline: float | None = None) -> bytes:
    """Return the body of the next frame. ``deadline`` is a time of the monotonic clock.

    Raises:
        Lost: the other side is gone, or does not write in time.
        Discarded: the work of this thread is not wanted any more.
    """
    return _exactly(end, int.from_bytes(_exactly(end, 4, deadline), "big"), deadline)


def requests(end: socket.socket) -> Iterator[Any]:
    """Yield the JSON values that the owner sends, until it is gone. This is for the process itself, which then ends."""
    with end.makefile("rb") as frames:
        while len(length := frames.read(4)) == 4:
            yield json.loads(frames.read(int.from_bytes(length, "big")))


def owner() -> socket.socket:
    """Return the socket to the owner, which stands at the standard input of the process that calls this, and clear
    that."""
    end = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return end


class Servant:
    """Owns a process, which is started when it is first needed. Threads take turns by ``lock``.

    A subclass says what it runs (:meth:`command`), and with what, and when it is ready.

    A process that has ended is replaced when it is next needed. It is killed, with all of its group, when this object
    or the program ends. A fork of this process leaves it alone and starts its own.

    Args:
        folder: where it begins, by default where this process is.
        silent: whether what it prints is thrown away.
        patience: the seconds that it has to end by itself when this side is closed, before it is killed.
    """

    def __init__(self, folder: str | None = None, silent: bool = False, patience: float = 0.0):
        self.folder, self.silent, self.patience = folder, silent, patience
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        """The process while there is one."""
        self.connection: socket.socket | None = None
        """The socket to it."""
        self._stop: Callable[[], Any] = lambda: None
        _ALL.add(self)

    def command(self) -> Sequence[str]:
        """Return the program of a process that starts, and its arguments."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str] | None:
        """Return the variables of a process that starts. None: those of this process."""
        return None

    def begin(self, end: socket.socket) -> None:
        """Wait until a new process is ready. What this raises ends it."""

    def connected(self) -> socket.socket:
        """Return the socket to the process, which is started unless it runs. The caller holds ``lock``."""
        if self.connection is None or self.process is None or self.process.poll() is not None:
            self.close()
            self.connection, far = socket.socketpair()
            printed = subprocess.DEVNULL if self.silent else 2
            with far:
                self.process = subprocess.Popen(
                    self.command(),
                    stdin=far.fileno(),
                    stdout=printed,
                    stderr=printed,
                    env=self.environment(),
                    cwd=self.folder,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends that one
                )
            # not a method, which would keep this object for ever
            self._stop = weakref.finalize(self, _ended, self.process, self.connection, self.patience)
            try:
                self.begin(self.connection)
            except BaseException:
                self.close()
                raise
        return self.connection

    def ask(self, request: Any, seconds: float | None = None) -> Any:
        """Return the answer to a JSON value, which is one too. A process that is lost is replaced by the next request.

        Raises:
            Lost: the process ended, or did not answer within ``seconds``.
            Discarded: the work of this thread is not wanted any more.
        """
        with self.lock:
            end = self.connected()
            deadline = None if seconds is None else time.monotonic() + seconds
            try:
                send(end, json.dumps(request).encode(), deadline)
                return json.loads(receive(end, deadline))
            except BaseException:  # the answer that was not read would be that to the next request
                self.close()
                raise

    def close(self) -> None:
        """End the process. The next request starts another one."""
        self._stop()
        self.process = self.connection = None

    def _left_to_the_parent(self) -> None:
        """Leave the process to the one that this one was forked from, whose threads may just have been using it."""
        self.lock = threading.Lock()
        if isinstance(self._stop, weakref.finalize):
            self._stop.detach()
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.returncode = 0  # it is not waited for here
        self.process = self.connection = None


def _ended(process: subprocess.Popen[bytes], end: socket.socket, patience: float) -> None:
    """Kill a process and its group, unless it ends by itself in time."""
    end.close()
    if patience:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exactly(end: socket.socket, count: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        _wait(end, select.POLLIN, deadline)
        try:
            piece = end.recv(min(count - len(received), _PIECE), socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except OSError:
            raise Lost("killed") from None
        if not piece:
            raise Lost("killed")
        received += piece
    return bytes(received)


def _wait(end: socket.socket, event: int, deadline: float | None) -> None:
    poller = select.poll()
    try:
        poller.register(end, event)
    except ValueError:  # another thread has closed it
        raise Lost("killed") from None
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not until(lambda seconds: poller.poll(seconds * 1000), left):
        raise Lost("timeout")


_ALL: "weakref.WeakSet[Servant]" = weakref.WeakSet()


def _all_left_to_the_parent() -> None:
    for servant in list(_ALL):
        servant._left_to_the_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_left_to_the_parent)
