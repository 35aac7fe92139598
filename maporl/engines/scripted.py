"""The engine ``python``, which a Python program passes to its trainer. A configuration cannot build it.

:class:`ScriptedEngine` is one whose agents follow a script, for tests, warm starts and fixed opponents.
"""

from collections.abc import Callable

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.errors import ConfigError
from trl_ext.ppo.options import Decoding


class ScriptedEngine(Engine):
    """Answers every request with the text that ``script(request)`` returns."""

    def __init__(self, script: Callable[[Request], str]):
        self.script = script

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request. ``decoding`` is ignored."""
        return [Reply(self.script(request)) for request in requests]


def build(setup: EngineSetup) -> Engine:
    """Refuse, because no name says how to build the engine.

    Raises:
        ConfigError: always. The message names the agents.
    """
    agents = ", ".join(sorted(setup.options))
    raise ConfigError(f"engine 'python' of {agents}: was passed in Python; pass it again by engines={{'python': ...}}")
