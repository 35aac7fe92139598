"""The contract of an engine: something that answers. Imports no torch."""

from dataclasses import dataclass, field

from maporl.engines.transcript import Transcript
from maporl.types import Ask, Example, Stop


@dataclass
class Request:
    """One Ask in its place: the dialogue's example, the agent's turn and conversation so far, whose weights answer.

    ``rng_key`` names the random numbers of the answer, which do not depend on what else is asked for; None: torch's.
    """

    ask: Ask
    example: Example
    turn: int
    utterance: int
    transcript: Transcript
    label: str
    policy: str = ""
    rng_key: tuple | None = None


@dataclass
class Reply:
    """What an engine answers; token engines also say which ids were seen and sampled."""

    text: str
    stop: Stop = Stop.EOS
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None


class Engine:
    """Something that answers. Derive from it and define :meth:`generate`; the hooks do nothing unless they are overridden."""

    remote: bool = False
    """Whether it answers with weights of its own while those of this process are being updated."""

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]:
        """One reply for each request, in order; ``temperature`` 0 is greedy."""
        raise NotImplementedError(f"{type(self).__name__}: an engine defines generate(requests, temperature)")

    def sync(self, policy: str) -> None:
        """The weights of ``policy`` have changed; all processes call this together."""

    def release(self) -> None:
        """Dialogues have ended: what was kept of them may go."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log after every update."""
        return {}
