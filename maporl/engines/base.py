"""The contract of an engine, which answers for agents. Imports no torch."""

from dataclasses import dataclass, field

from maporl.engines.transcript import Transcript
from maporl.types import Ask, Example, Stop, Utterance
from trl_ext.ppo_options import Decoding


@dataclass
class Request:
    """One :class:`maporl.types.Ask` with its context.

    Args:
        ask: what the protocol asks for.
        example: the example of the dialogue.
        turn: the agent's turn, from 0.
        utterance: the id that the answer's utterance will have.
        transcript: the agent's conversation so far.
        label: the request's name in errors.
        policy: the name of the policy that answers.
        rng_key: the key of the answer's random numbers, which do not depend on other requests. None uses torch's state.
        heard: the utterances whose text is in the messages.
    """

    ask: Ask
    example: Example
    turn: int
    utterance: int
    transcript: Transcript
    label: str
    policy: str = ""
    rng_key: tuple | None = None
    heard: tuple[Utterance, ...] = ()


@dataclass
class Reply:
    """An engine's answer. Engines that work on tokens also give the ids of the prompt and of the completion."""

    text: str
    stop: Stop = Stop.EOS
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None


class Engine:
    """The base class of engines. A subclass defines :meth:`generate`, and may override the hooks."""

    remote: bool = False
    """Whether the engine samples from its own copy of the weights, while those of this process are being updated."""

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order. ``decoding`` says how its tokens are drawn."""
        raise NotImplementedError(f"{type(self).__name__}: an engine defines generate(requests, decoding)")

    def sync(self, policy: str) -> None:
        """Hook: take over the weights of ``policy``, which are new or have changed.

        A trainer and a player call this for every policy of the team before the first :meth:`generate`, and a trainer
        calls it again after every update. All processes call this together. They do not call :meth:`generate` together,
        so :meth:`generate` must not wait for other processes.
        """

    def release(self) -> None:
        """Hook: drop what was kept of dialogues, because they have ended."""

    def metrics(self) -> dict[str, float]:
        """Hook: return metrics to log after every update."""
        return {}
