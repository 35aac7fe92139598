"""A judge of steps: an agent that is asked about everything that was said, after any protocol, and that learns.

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, cast

from maporl.errors import ConfigError
from maporl.protocols.base import Play, Protocol
from maporl.text import matches, pattern_option, text_option
from maporl.types import Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Positive, option, options

TEXT = (
    "{seen}\n\nThe answer to this:\n{said}\n\nWas it a good step? Think, and end with 'Verdict: good' or 'Verdict: "
    "bad'."
)
TAUGHT = ("Verdict: good", "Verdict: bad")
"""What warm starts teach a judge to say."""


@options(frozen=True)
class StepJudge:
    """The options of ``protocol.step_judge`` (RLAnything, arXiv 2602.02488).

    When a dialogue is over, ``agent`` is asked ``samples`` times about each utterance, at the same time and outside any
    conversation. Nobody is judged in evaluations.

    A verdict is tagged ``verdict``: 1, -1, or None if it cannot be read. Its caller is what it judges. The rule
    ``consistency`` pays it.

    Raises:
        ValueError: ``samples`` is below 1, ``text`` has an unknown placeholder, or a pattern is not a regular
            expression.
    """

    agent: str = option(help="The agent that judges.")
    samples: Positive = option(3, "How often it is asked about each utterance.")
    text: str = text_option(
        TEXT, "What it is asked, with {seen}, the messages that were new to the speaker, {said!} and {question}."
    )
    good: str = pattern_option(
        r"(?i)verdict:\s*good",
        "A regular expression that is found in a verdict that the step was good. A verdict must be one of both.",
    )
    bad: str = pattern_option(r"(?i)verdict:\s*bad", "A regular expression that is found in a verdict that it was bad.")

    def asks(self, example: Example, said: Sequence[Utterance]) -> list[Ask]:
        """Return what the judge is asked about all that was ``said``."""
        return [self._ask(example, u) for u in said for _ in range(self.samples)]

    def _ask(self, example: Example, u: Utterance) -> Ask:
        seen = "\n\n".join(message["content"] for message in u.messages)
        text = self.text.format(seen=seen, said=u.text, question=example.question)
        told = user_says(text)
        return Ask(self.agent, told, "judge", (u.id,), u.id, answers=False, fresh=True, taught=TAUGHT)

    def read(self, verdict: Utterance) -> None:
        """Tag a verdict with what it says."""
        good, bad = (any(matches(pattern, verdict.text)) for pattern in (self.good, self.bad))
        verdict.tags["verdict"] = None if good == bad else 1 if good else -1


def judged(protocol: Protocol, judge: StepJudge) -> Protocol:
    """Return ``protocol`` with a judge of its steps. It is still a protocol of its own class.

    Raises:
        ConfigError: the protocol names the judge as one of its players.
    """
    if judge.agent in protocol.mentioned():
        raise ConfigError(f"protocol.step_judge.agent: {judge.agent!r} plays in {protocol.label}; name another agent")
    kind = cast(Any, type(protocol))  # mypy takes no class for Hashable
    return _judged_kind(kind, judge, asked=True)(**_options(protocol))


def judge_of(protocol: Protocol) -> StepJudge | None:
    """Return the judge of the steps of ``protocol``, if it has one."""
    return protocol.step_judge if isinstance(protocol, _Judged) else None


def unjudged_kind(protocol: Protocol) -> type[Protocol]:
    """Return the class of ``protocol``, without the judge of its steps."""
    return type(protocol).__mro__[2] if isinstance(protocol, _Judged) else type(protocol)


class _Judged(Protocol):
    """What a protocol with a judge of its steps does otherwise."""

    step_judge: ClassVar[StepJudge]
    asked: ClassVar[bool]
    every_step_scored = False  # a step is paid when all of it was judged
    roles = True

    @property
    def records(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the protocol
        """The columns that the protocol records, and callers."""
        return super().records | {"caller"}

    @property
    def label(self) -> str:
        return unjudged_kind(self).__name__.lower()

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the protocol without the judge, and then ask it."""
        play = super().play(example, self._without_judge(agents))
        said: list[Utterance] = []
        sent: Any = None
        while True:
            try:
                moves = play.send(sent)  # None begins it
            except StopIteration as end:
                outcome = end.value
                break
            sent = yield moves
            said += [one for one in sent if isinstance(one, Utterance)]
        if said and self.asked:
            for verdict in (yield self.step_judge.asks(example, said)):
                self.step_judge.read(verdict)
        return outcome

    def helpers(self) -> tuple[str, ...]:
        return (*super().helpers(), self.step_judge.agent)

    def in_evaluation(self) -> Protocol:
        """Return the protocol of evaluations, in which the judge is not asked, and does not play."""
        held_out = super().in_evaluation()
        return _judged_kind(cast(Any, unjudged_kind(held_out)), self.step_judge, asked=False)(**_options(held_out))

    def check_players(self, players: tuple[str, ...]) -> None:
        super().check_players(self._without_judge(players))

    def _without_judge(self, agents: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(agent for agent in agents if agent != self.step_judge.agent)


@cache
def _judged_kind(kind: type[Protocol], judge: StepJudge, asked: bool) -> Any:
    """Return a class that derives from ``kind``, so that whoever asks for the kind of a protocol finds it."""
    return type(kind.__name__, (_Judged, kind), {"step_judge": judge, "asked": asked})


def _options(protocol: Any) -> dict[str, Any]:
    return {field.name: getattr(protocol, field.name) for field in fields(protocol) if field.init}
