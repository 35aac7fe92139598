"""An engine whose agents follow a script: for tests, for warm starts, for a fixed opponent."""

from collections.abc import Callable

from maporl.engines.base import Engine, Reply, Request


class ScriptedEngine(Engine):
    """Answers with ``script(request) -> text``."""

    def __init__(self, script: Callable[[Request], str]):
        self.script = script

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]:
        """One reply per request; ``temperature`` has nothing to act on."""
        return [Reply(self.script(request)) for request in requests]
