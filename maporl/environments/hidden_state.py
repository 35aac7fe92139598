"""State of the process that code of environments may change: random generators and the working folder. No torch."""

import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from maporl.environments.base import Environment
from maporl.event_loop import awaited

PARTS = ("Python's global random generator", "NumPy's global random generator", "the working folder")


def hidden_state() -> tuple[Any, Any, str]:
    """Return what :data:`PARTS` are now. NumPy's generator is None as long as nobody has imported NumPy."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    return random.getstate(), drawn, os.getcwd()


def changed(before: tuple[Any, Any, str]) -> list[str]:
    """Return which of :data:`PARTS` are not as they were ``before``."""
    now = hidden_state()
    drawn = before[1] is not None and not all(map(_same, before[1], now[1]))
    return [part for part, other in zip(PARTS, (before[0] != now[0], drawn, before[2] != now[2]), strict=True) if other]


class Alone:
    """Runs code of environments. Instances of a class that share hidden state take turns, and leave it as it was."""

    def __init__(self) -> None:
        self._locks: dict[type, threading.Lock] = {}

    def run(self, world: Environment, code: Callable[[], Any]) -> Any:
        """Return what ``code`` of ``world`` returns. A coroutine is awaited here if its instances take turns."""
        if world.concurrent:
            return code()
        with self._locks.setdefault(type(world), threading.Lock()):
            kept, drawn, folder = hidden_state()
            try:
                return awaited(code())
            finally:
                random.setstate(kept)
                if drawn is not None:
                    sys.modules["numpy"].random.set_state(drawn)
                os.chdir(folder)


def _same(one: Any, other: Any) -> bool:
    """Return whether two parts of NumPy's state, of which one is an array, are equal."""
    return one.tolist() == other.tolist() if hasattr(one, "tolist") else one == other
