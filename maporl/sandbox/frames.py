"""The owner's side of the pipes to the sandbox's worker: whole frames, each before a deadline."""

import os
import select
import struct
import time
from typing import Any

from trl_ext.process.waits import until


class Lost(Exception):
    """The worker died ("killed") or did not answer in time ("timeout"); the message is one of the two words."""


def send(stream: Any, payload: bytes, deadline: float) -> None:
    """Send ``payload`` to the worker as one frame. ``deadline`` is a time of the monotonic clock.

    Raises:
        Lost: the worker died, or does not read in time.
    """
    frame = struct.pack(">I", len(payload)) + payload
    while frame:
        _wait(stream, select.POLLOUT, deadline)
        try:
            sent = os.write(stream.fileno(), frame[: select.PIPE_BUF])  # so much never blocks
        except BrokenPipeError:
            raise Lost("killed") from None
        frame = frame[sent:]


def receive(stream: Any, deadline: float) -> bytes:
    """One frame from the worker: four bytes of length, then so many bytes. ``deadline`` is a time of the monotonic clock.

    Raises:
        Lost: the worker died, or does not answer in time.
    """
    header = _receive_bytes(stream, 4, deadline)
    return _receive_bytes(stream, struct.unpack(">I", header)[0], deadline)


def _receive_bytes(stream: Any, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        _wait(stream, select.POLLIN, deadline)
        piece = os.read(stream.fileno(), count - len(received))
        if not piece:
            raise Lost("killed")
        received += piece
    return received


def _wait(stream: Any, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(stream, event)
    if not until(lambda seconds: poller.poll(seconds * 1000), max(0.0, deadline - time.monotonic())):
        raise Lost("timeout")
