"""One event loop of a process, in a thread of its own, for the coroutines of foreign libraries.

What one coroutine opens, such as a connection, others can use only in the same loop.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
_LOCK = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which is started when it is first asked for. A forked process gets its own."""
    with _LOCK:
        if os.getpid() not in _LOOPS:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="maporl adapters", daemon=True).start()
        return _LOOPS[os.getpid()]


def wait(coroutine: Coroutine[Any, Any, Value], seconds: float | None = None) -> Value:
    """Return what a coroutine returns, from a thread without this loop.

    Raises:
        TimeoutError: it took longer than ``seconds``, and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result(seconds)
    except TimeoutError:
        future.cancel()
        raise


async def inside(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Return what a coroutine returns in this loop, from another loop. It is cancelled if the caller is."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, event_loop()))
