"""An engine for people: it shows an agent's new messages and reads one answer."""

from collections.abc import Callable

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.text import printable, visible, well_formed
from trl_ext.ppo.options import Decoding


class SeatLeft(RuntimeError):
    """The person has left: their input has ended."""


class HumanEngine(Engine):
    """Asks a person for every answer. An empty answer is asked for again.

    Args:
        show: prints a line.
        read: shows a prompt and waits for a line.
    """

    remote = True
    between = True

    def __init__(self, show: Callable[[str], None] = print, read: Callable[[str], str] = input):
        self.show, self.read = show, read

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one typed answer for each request, in order.

        Raises:
            SeatLeft: the input ended before all requests were answered.
        """
        return [Reply(self._ask(request)) for request in requests]

    def _ask(self, request: Request) -> str:
        name = printable(request.ask.agent)
        self.show(f"\n[{name}, turn {request.turn + 1}]")
        for message in request.messages:
            self.show(visible(message["content"]))
        if moves := request.ask.tags.get("moves"):
            self.show(f"(legal moves: {visible(', '.join(moves))})")
        while True:
            try:
                text = well_formed(self.read(f"{name}> "))
            except EOFError:
                raise SeatLeft(f"{request.label}: the input ended before this agent answered") from None
            except UnicodeDecodeError:  # a terminal may send anything
                self.show("(that was not valid UTF-8)")
                continue
            if text.strip():
                return text
            self.show("(type an answer, or Ctrl-D to leave)")


def build(setup: EngineSetup) -> HumanEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names. The person sits at this terminal."""
    return HumanEngine()
