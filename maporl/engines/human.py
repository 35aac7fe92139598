"""An engine for people: shows what is new to the agent, reads one answer."""

from collections.abc import Callable

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.text import visible


class SeatLeft(RuntimeError):
    """The person is gone: their input has ended."""


class HumanEngine(Engine):
    """``show`` prints a line, ``read`` waits for one; an empty line is asked again, end of input is an error."""

    remote = True

    def __init__(self, show: Callable[[str], None] = print, read: Callable[[str], str] = input):
        self.show, self.read = show, read

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]:
        """One typed answer per request."""
        return [Reply(self._ask(request)) for request in requests]

    def _ask(self, request: Request) -> str:
        self.show(f"\n[{request.ask.agent}, turn {request.turn + 1}]")
        for message in request.ask.messages:
            self.show(visible(message["content"]))
        while True:
            try:
                text = self.read(f"{request.ask.agent}> ")
            except EOFError:
                raise SeatLeft(f"{request.label}: the input ended before this agent answered") from None
            if text.strip():
                return text.encode("utf-8", "surrogateescape").decode(
                    "utf-8", "replace"
                )  # a terminal may send anything
            self.show("(type an answer, or Ctrl-D to leave)")


def build(setup: EngineSetup) -> HumanEngine:
    """The engine of :data:`maporl.engines.ENGINES`: at this terminal."""
    return HumanEngine()
