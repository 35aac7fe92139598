"""The contract of an engine, which answers for agents. Imports no torch."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from maporl.decoding import Sampling, StructuredOutput
from maporl.engines.transcript import Transcript
from maporl.environments.calls import CallFormat
from maporl.types import Ask, Example, Message, Stop, Utterance
from trl_ext.ppo.options import Decoding, Grammar
from trl_ext.process.waits import result
from trl_ext.sampling.engine import Ready


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
        messages: the messages of ``ask`` as the engine reads them: results of calls as the agent's call format shows
            them. By default they are those of ``ask``.
        sampling: how the answer is sampled, without lists by turn. None: as the whole run.
        form: how the agent writes calls, or None if it may call nothing.
        refusal: why no engine is asked, or None.
        call_ends: the strings that complete a call, after which the answer ends, because a result must follow. They
            are not among the stop strings of the policy and of ``sampling``.
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
    messages: list[Message] = field(default_factory=list)
    sampling: Sampling | None = None
    call_ends: tuple[str, ...] = ()
    form: CallFormat | None = None
    refusal: str | None = None

    def __post_init__(self):
        self.messages = self.messages or self.ask.messages

    @property
    def temperature(self) -> float | None:
        """Return the temperature of the answer, or None if it is that of the run."""
        return None if self.sampling is None else self.sampling.at(0).get("temperature")

    @property
    def structured_output(self) -> StructuredOutput | None:
        """Return what the answer is held to."""
        return self.settings.get("structured_output")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the values of :attr:`sampling` by name, without those that are as in the whole run."""
        return {} if self.sampling is None else self.sampling.at(0)

    def longest(self, default: int) -> int:
        """Return the most tokens of the answer. ``default`` is the length of the run."""
        return self.settings.get("max_tokens", default)

    def drawn(self, decoding: Decoding) -> Decoding:
        """Return how the tokens of the answer are drawn. ``decoding`` is that of the run."""
        drawn = {name: value for name, value in self.settings.items() if hasattr(decoding, name)}
        return replace(decoding, **drawn)


@dataclass
class Reply:
    """An engine's answer. Engines that work on tokens also give the ids of the prompt and of the completion.

    Args:
        version: the number of updates that the weights had. None: those of the engine's last :meth:`Engine.sync`.
        no_text: why there is nothing but, for example, a refusal, or a thought that the prompt has begun ("thinking").
            The utterance has it in its tag ``no_text``.
        refused: why a refusable ask was not answered. The utterance has it in its tag ``refused``.
        too_long: whether that is because it does not fit the model's context. The utterance then has the tag
            ``too_long``.
        grammar: what its tokens were held to, or None.
        tokens: the tokens' texts and log-probabilities, if the ask wants them (:attr:`maporl.types.Ask.tokens`).
        usage: the numbers of tokens of the prompt and of the answer, where only the engine knows them. The utterance
            has them in its tag ``usage``.
    """

    text: str
    stop: Stop = Stop.EOS
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    version: int | None = None
    no_text: str | None = None
    refused: str | None = None
    too_long: bool = False
    grammar: Grammar | None = None
    tokens: list[tuple[str, float, list[tuple[str, float]]]] = field(default_factory=list)
    usage: list[int] | None = None


@dataclass(slots=True)
class Pending:
    """An answer that an engine is working on.

    Args:
        future: the work, which may be done in another thread or on another machine.
        read: turns the result of the work into the reply. It runs in the thread that plays the dialogues. None means
            that the result is the reply.
    """

    future: Future[Any] | Ready[Any]
    read: Callable[[Any], Reply] | None = None

    def reply(self) -> Reply:
        """Return the reply, for which this waits."""
        answer = self.future.result() if isinstance(self.future, Ready) else result(self.future)
        return answer if self.read is None else self.read(answer)


class Engine:
    """The base class of engines. A subclass defines :meth:`generate`, and may override the hooks."""

    remote: bool = False
    """Whether the engine samples from its own copy of the weights, while those of this process are being updated."""
    version: int = 0
    """The number of updates that the weights of the last :meth:`sync` have had. A trainer sets it before."""
    between: bool = False
    """Whether it takes new weights between two answers of a dialogue. Otherwise dialogues end before :meth:`sync`."""
    continuous: bool = False
    """Whether answers come one by one (:meth:`submit`), so that a dialogue can go on before others have their answers.
    """

    tells_tokens: bool = False
    """Whether it knows the tokens of its answers, and shows them where an ask wants this (:attr:`Reply.tokens`)."""

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order. ``decoding`` says how its tokens are drawn."""
        raise NotImplementedError(f"{type(self).__name__}: an engine defines generate(requests, decoding)")

    def submit(self, requests: list[Request], decoding: Decoding) -> list[Pending]:
        """Begin to answer, and return one pending answer for each request, in order.

        This implementation answers all requests at once, by :meth:`generate`.
        """
        return [Pending(Ready(reply)) for reply in self.generate(requests, decoding)]

    def advance(self) -> bool:
        """Hook: work for a moment on what was submitted, if this is done in this thread.

        Return whether there is more to do.
        """
        return False

    def sync(self, policy: str) -> None:
        """Hook: take over the weights of ``policy``, which are new or have changed.

        A trainer and a player call this for every policy of the team before the first :meth:`generate`, and a trainer
        calls it again after every update. All processes call this together. They do not call :meth:`generate` together,
        so :meth:`generate` must not wait for other processes.
        """

    def release(self) -> None:
        """Hook: drop what was kept of dialogues and what is left of submitted requests, because the dialogues have
        ended."""

    def metrics(self) -> dict[str, float]:
        """Hook: return metrics to log after every update."""
        return {}
