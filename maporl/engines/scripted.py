"""An engine whose agents follow a script, for tests, warm starts and fixed opponents."""

from collections.abc import Callable

from maporl.engines.base import Engine, Reply, Request
from trl_ext.ppo.options import Decoding


class ScriptedEngine(Engine):
    """Answers every request with the text that ``script(request)`` returns."""

    def __init__(self, script: Callable[[Request], str]):
        self.script = script

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request. ``decoding`` is ignored."""
        return [Reply(self.script(request)) for request in requests]
