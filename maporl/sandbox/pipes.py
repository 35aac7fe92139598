"""Write to several pipes and read from several others at once, before a deadline."""

import os
import select
import time
from collections.abc import Mapping

from trl_ext.waits import until


def exchange(written: Mapping[int, bytes], read: Mapping[int, int], deadline: float) -> tuple[dict[int, bytes], bool]:
    """Write to some pipes, and read others to their ends, or until one gives more than its number of bytes.

    ``written``: for each descriptor what is written to it; one that nobody reads from loses what is left. ``read``: for
    each descriptor how many bytes are expected at most. ``deadline`` is a time of the monotonic clock.

    Returns:
        (what was read, by descriptor; whether that was all before the deadline)
    """
    poller = select.poll()
    left = {descriptor: memoryview(data) for descriptor, data in written.items() if data}
    for descriptor in left:
        os.set_blocking(descriptor, False)
        poller.register(descriptor, select.POLLOUT)
    found = dict.fromkeys(read, b"")
    for descriptor in read:
        poller.register(descriptor, select.POLLIN)
    open_ones = set(read)
    while open_ones:
        ready = until(lambda seconds: poller.poll(seconds * 1000), max(0.0, deadline - time.monotonic()))
        if not ready:
            return found, False
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
            found[descriptor] += piece
            if len(found[descriptor]) > read[descriptor]:
                return found, True
            if not piece:
                poller.unregister(descriptor)
                open_ones.discard(descriptor)
    return found, True
