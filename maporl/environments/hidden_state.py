"""State of the process that code of environments may change: random generators and the working folder. No torch."""

import os
import threading
from collections.abc import Callable
from typing import Any

from maporl.environments.base import Environment
from maporl.event_loop import awaited
from trl_ext.process.random_states import GeneratorStates, forked_generators, generator_states, same_states

PARTS = ("Python's global random generator", "NumPy's global random generator", "the working folder")


def hidden_state() -> tuple[GeneratorStates, str]:
    """Return what :data:`PARTS` are now."""
    return generator_states(), os.getcwd()


def changed(before: tuple[GeneratorStates, str]) -> list[str]:
    """Return which of :data:`PARTS` are not as they were ``before``."""
    states, folder = hidden_state()
    same = (*same_states(before[0], states), before[1] == folder)
    return [part for part, unchanged in zip(PARTS, same, strict=True) if not unchanged]


class Alone:
    """Runs code of environments. Instances of a class that share hidden state take turns, and leave it as it was."""

    def __init__(self) -> None:
        self._locks: dict[type, threading.Lock] = {}

    def run(self, world: Environment, code: Callable[[], Any]) -> Any:
        """Return what ``code`` of ``world`` returns. A coroutine is awaited here if its instances take turns."""
        if world.concurrent:
            return code()
        with self._locks.setdefault(type(world), threading.Lock()), forked_generators():
            folder = os.getcwd()
            try:
                return awaited(code())
            finally:
                os.chdir(folder)
