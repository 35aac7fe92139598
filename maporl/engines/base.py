"""The Engine contract: something that answers."""

from dataclasses import dataclass, field
from typing import Protocol as Interface

from maporl.transcripts import Transcript
from maporl.types import Ask, Example, Stop


@dataclass
class Request:
    """One Ask in its place: the dialogue's example, the agent's turn and conversation so far, whose weights answer.

    ``draw`` names the random numbers of the answer, which do not depend on what else is asked for; None: torch's.
    """

    ask: Ask
    example: Example
    turn: int
    utterance: int
    transcript: Transcript
    label: str
    policy: str = ""
    draw: tuple | None = None


@dataclass
class Reply:
    """What an engine answers; token engines also say which ids were seen and sampled."""

    text: str
    stop: Stop = Stop.EOS
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None


class Engine(Interface):
    """``generate`` answers a batch, in order; ``sync`` is told that a policy's weights have changed.

    An engine may also have ``release()``, called when dialogues have ended, and ``metrics()``, logged after every update.
    """

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]: ...

    def sync(self, policy: str) -> None: ...
