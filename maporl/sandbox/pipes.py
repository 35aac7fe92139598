"""Write to several pipes and read from several others at once, before a deadline."""

import os
import select
import time
from collections.abc import Mapping
from typing import NamedTuple

from trl_ext.process.waits import until


class Exchanged(NamedTuple):
    """What :func:`exchange` read.

    ``received``: what each descriptor gave. ``heard``: for each descriptor, when something came (a time of the
    monotonic clock), and how many bytes it had then given. ``in_time``: whether all of it came before the deadline.
    """

    received: dict[int, bytes]
    heard: dict[int, list[tuple[float, int]]]
    in_time: bool


def exchange(written: Mapping[int, bytes], read: Mapping[int, int], deadline: float) -> Exchanged:
    """Write to some pipes, and read others to their ends, or until one gives more than its number of bytes.

    ``written``: for each descriptor what is written to it; one that nobody reads from loses what is left. ``read``: for
    each descriptor how many bytes are expected at most. ``deadline`` is a time of the monotonic clock.
    """
    poller = select.poll()
    left = {descriptor: memoryview(data) for descriptor, data in written.items() if data}
    for descriptor in left:
        os.set_blocking(descriptor, False)
        poller.register(descriptor, select.POLLOUT)
    received = dict.fromkeys(read, b"")
    heard: dict[int, list[tuple[float, int]]] = {descriptor: [] for descriptor in read}
    for descriptor in read:
        poller.register(descriptor, select.POLLIN)
    open_ones = set(read)
    while open_ones:
        ready = until(lambda seconds: poller.poll(seconds * 1000), max(0.0, deadline - time.monotonic()))
        if not ready:
            return Exchanged(received, heard, False)
        for descriptor, _ in ready:
            if descriptor in left:
                try:
                    left[descriptor] = left[descriptor][os.write(descriptor, left[descriptor]) :]
                except BrokenPipeError:
                    left[descriptor] = left[descriptor][:0]
                if not left[descriptor]:
                    poller.unregister(descriptor)
                    del left[descriptor]
                continue
            piece = os.read(descriptor, 65536)
            received[descriptor] += piece
            heard[descriptor].append((time.monotonic(), len(received[descriptor])))
            if len(received[descriptor]) > read[descriptor]:
                return Exchanged(received, heard, True)
            if not piece:
                poller.unregister(descriptor)
                open_ones.discard(descriptor)
    return Exchanged(received, heard, True)
