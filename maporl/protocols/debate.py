"""Debate (Du et al. 2023, arXiv 2305.14325; trained: MAPoRL, arXiv 2502.18439).

All agents answer at the same time, for several turns. From the second turn on, each agent is shown the last answers of
the others. It remembers its own answers, because its conversation continues.
"""

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Literal

from maporl.protocols.base import Play, Protocol, check_template
from maporl.types import Ask, Example, Utterance

OTHERS = (
    "These are answers of other agents to the same question:\n\n{others}\n\n"
    "Weigh them against your own. Correct yourself where you were wrong, keep what is right, do not merely repeat, and "
    "justify your answer briefly.\n\n{question}"
)
ALONE = "Reconsider your answer. Correct it where it was wrong, keep what is right.\n\n{question}"


@dataclass(frozen=True)
class Feedback:
    """How agents are told the scores of answers between turns. A score is between 0 and 1.

    ``verdicts`` lists (bound, words) with rising bounds. The words of the first bound above the score are used; beyond
    all bounds, the last words are used. ``own`` is told to the author of the answer, together with ``explanation``, and
    ``others`` is told to the other agents.

    Raises:
        ValueError: the bounds are missing, or they do not rise.
    """

    verdicts: list[tuple[float, str]] = field(
        default_factory=lambda: [
            (0.3, "is very likely wrong"),
            (0.6, "may be wrong, or needs a stronger argument"),
            (0.8, "seems right, but should be checked again"),
            (1.0, "is likely right"),
        ]
    )
    own: str = "Your last answer was scored {score:.3f} out of 1.0: it {verdict}."
    others: str = "This answer was scored {score:.3f} out of 1.0: it {verdict}."
    explanation: str = "The score estimates the probability that an answer is right. It can be mistaken."

    def __post_init__(self):
        bounds = [bound for bound, _ in self.verdicts]
        if not bounds or bounds != sorted(bounds):
            raise ValueError(f"words.verdicts: expected bounds in rising order, got {bounds}")

    def verdict(self, score: float) -> str:
        """Return the words for ``score``.

        >>> [Feedback().verdict(s) for s in (0.29, 0.3, 0.8)]
        ['is very likely wrong', 'may be wrong, or needs a stronger argument', 'is likely right']
        """
        return next((words for bound, words in self.verdicts if score < bound), self.verdicts[-1][1])

    def tell(self, template: str, utterance: Utterance, source: str) -> str:
        """Return the line about ``utterance``; empty if the source gave it no score."""
        score = utterance.rewards.get(source)
        return "" if score is None else template.format(score=score, verdict=self.verdict(score))


@dataclass(frozen=True)
class Consensus:
    """Ends a question early if the agents agree.

    At least ``share`` of the agents must give the same answer, and the mean score of these agents must be at least
    ``score``. The rule applies from update ``from_update`` on, counted from 1.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """

    share: float = 0.8
    score: float = 0.7
    from_update: int = 1

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"consensus.share: expected a share above 0 and at most 1, got {self.share}")

    def reached(self, said: list[Utterance]) -> bool:
        """Return whether these answers of one turn agree well enough. An unreadable answer agrees with no other answer."""
        votes = Counter(u.grade.answer for u in said if u.grade is not None and u.grade.answer is not None)
        if not votes:
            return False
        most = max(votes.values())
        if most / len(said) < self.share:
            return False
        for answer in (a for a, n in votes.items() if n == most):
            scores = [u.rewards["score"] for u in said if u.grade is not None and u.grade.answer == answer]
            if sum(scores) / len(scores) >= self.score:
                return True
        return False


@dataclass(frozen=True)
class Debate(Protocol):
    """A debate of ``turns`` turns. In each turn all agents answer at the same time.

    ``opening`` may use ``{question}``. ``later`` may use ``{question}`` and ``{others}``. ``{others}`` contains one
    ``quote`` for each other agent, joined with ``separator``; a quote may use ``{number}`` (counted from 1), ``{name}``
    and ``{text}``. ``alone`` replaces ``later`` if an agent plays alone.

    ``feedback`` names a reward source. Its score of each answer is told to the author and to the others before the next
    turn, in the ``words`` of :class:`Feedback`. ``consensus`` ends a question early. ``summariser`` names an agent that
    condenses the answers of the others for each agent before they are shown. It does not debate itself.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    turns: int = 2
    opening: str = "{question}"
    later: str = OTHERS
    alone: str = ALONE
    quote: str = "Agent {number}:\n```\n{text}\n```"
    separator: str = "\n\n"
    feedback: Literal["none", "label", "verifier"] = "none"
    words: Feedback = field(default_factory=Feedback)
    consensus: Consensus | None = None
    summariser: str | None = None
    summary: str = (
        "Condense these answers to the question below: what they conclude, and why.\n\n{others}\n\nQuestion: {question}"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.turns < 1:
            raise ValueError(f"turns: a debate has at least 1 turn, got {self.turns}")
        check_template("opening", self.opening, {"question"}, {"question"})
        check_template("later", self.later, {"question", "others"})
        check_template("alone", self.alone, {"question"})
        check_template("quote", self.quote, {"number", "name", "text"})
        check_template("summary", self.summary, {"question", "others"})

    simultaneous = True

    @property
    def every_step_scored(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether every step ends with an answer: false with a summariser, whose summaries are steps of their own."""
        return self.summariser is None

    @property
    def score_between_turns(self) -> bool:  # type: ignore[override]  # it follows from the options
        """True if there is a consensus rule, because it uses scores."""
        return self.consensus is not None

    @property
    def hears_others(self) -> bool:  # type: ignore[override]  # it follows from the options
        """True if there is a second turn."""
        return self.turns > 1

    def between_turns(self) -> frozenset[str]:
        """Return the source whose values the agents are told."""
        return frozenset({self.feedback} - {"none"})

    def helpers(self) -> tuple[str, ...]:
        """Return the summariser, if there is one."""
        return () if self.summariser is None else (self.summariser,)

    def at_update(self, update: int) -> "Debate":
        """Return the debate as it is played in ``update``, counted from 1: without consensus before its first update."""
        early = self.consensus is not None and update < self.consensus.from_update
        return replace(self, consensus=None) if early else self

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the debate. The outcome is "consensus" if the question ended early, else None."""
        debaters = [a for a in agents if a != self.summariser]
        said: list[Utterance] = []
        for turn in range(self.turns):
            if turn == 0:
                opening = [{"role": "user", "content": self.opening.format(question=example.question)}]
                said = yield [Ask(agent, opening) for agent in debaters]
                continue
            if self.consensus is not None and self.consensus.reached(said):
                return "consensus"
            asks = [self._ask(agent, example.question, said) for agent in debaters]
            if self.summariser is not None and len(debaters) > 1:
                asks = yield from self._condensed(asks, example.question, said)
            said = yield asks
        return None

    def _ask(self, agent: str, question: str, said: list[Utterance], summary: Utterance | None = None) -> Ask:
        """Return the ask that shows ``agent`` the other answers, or their summary, before its next answer."""
        others = [u for u in said if u.agent != agent]
        shown = summary.text if summary is not None else self._quotes(others)
        text = self.later.format(question=question, others=shown) if others else self.alone.format(question=question)
        mine = next(u for u in said if u.agent == agent)
        if told := self.words.tell(self.words.own, mine, self.feedback):
            text = "\n\n".join([f"{told} {self.words.explanation}".strip(), text])
        parents = (summary.id,) if summary is not None else tuple(u.id for u in others)
        return Ask(agent, [{"role": "user", "content": text}], parents=parents)

    def _quotes(self, others: list[Utterance]) -> str:
        quotes = []
        for number, u in enumerate(others, 1):
            quote = self.quote.format(number=number, name=u.agent, text=u.words())
            told = self.words.tell(self.words.others, u, self.feedback)
            quotes.append(f"{quote}\n{told}" if told else quote)
        return self.separator.join(quotes)

    def _condensed(
        self, asks: list[Ask], question: str, said: list[Utterance]
    ) -> Generator[list[Ask], list[Utterance], list[Ask]]:
        """Return ``asks`` with the summariser's words in place of the quotes."""
        requests = []
        for ask in asks:
            others = [u for u in said if u.agent != ask.agent]
            text = self.summary.format(question=question, others=self._quotes(others))
            requests.append(
                Ask(
                    str(self.summariser),
                    [{"role": "user", "content": text}],
                    role="summariser",
                    parents=ask.parents,
                    answers=False,
                    fresh=True,
                )
            )
        summaries = yield requests
        return [self._ask(a.agent, question, said, s) for a, s in zip(asks, summaries, strict=True)]
