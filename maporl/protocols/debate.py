"""Debate (Du et al. 2023, arXiv 2305.14325; trained: MAPoRL, arXiv 2502.18439).

All agents answer at the same time, for several turns. From the second turn on, each agent is shown the last answers of
the others. It remembers its own answers, because its conversation continues.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from maporl.protocols.base import (
    Play,
    Protocol,
    answered,
    check_somebody_speaks,
    check_speaks,
    mark_passes,
    speakers_of,
)
from maporl.rounding import exceeds
from maporl.text import text_option
from maporl.types import Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Finite, Positive, PositiveShare, option, options

OTHERS = (
    "These are answers of other agents to the same question:\n\n{others}\n\n"
    "Weigh them against your own. Correct yourself where you were wrong, keep what is right, do not merely repeat, and "
    "justify your answer briefly.\n\n{question}"
)
ALONE = "Reconsider your answer. Correct it where it was wrong, keep what is right.\n\n{question}"


@dataclass(frozen=True)
class Feedback:
    """The texts that show agents the scores of answers between turns. A score is between 0 and 1.

    Raises:
        ValueError: the bounds are missing, or they do not rise.
    """

    verdicts: list[tuple[float, str]] = option(
        [
            (0.3, "is very likely wrong"),
            (0.6, "may be wrong, or needs a stronger argument"),
            (0.8, "seems right, but should be checked again"),
            (1.0, "is likely right"),
        ],
        "A list of [bound, words] with rising bounds. The words of the first bound above the score are used; "
        "beyond all bounds, the last words are used.",
    )
    own: str = option(
        "Your last answer was scored {score:.3f} out of 1.0: it {verdict}.",
        "The text for the author of the answer, together with the explanation.",
    )
    others: str = option(
        "This answer was scored {score:.3f} out of 1.0: it {verdict}.",
        "The text for the other agents.",
    )
    explanation: str = option(
        "The score estimates the probability that an answer is right. It can be mistaken.",
        "What the score means.",
    )

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


@options(frozen=True)
class Consensus:
    """Ends a question early if the agents agree.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """

    share: PositiveShare = option(0.8, "Share of the agents that must give the same answer.")
    score: float = option(0.7, "Least mean score of these agents.")
    from_update: int = option(1, "The first update in which questions end early, counted from 1.")

    def reached(self, said: list[Utterance]) -> bool:
        """Return whether these answers of one turn agree well enough.

        An unreadable answer agrees with no other answer.
        """
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

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    turns: Positive = option(2, "Number of turns.")
    opening: str = text_option("{question}", "What agents are asked in the first turn, with {question!}.")
    later: str = text_option(OTHERS, "What they are shown in later turns, with {question} and {others}.")
    alone: str = text_option(ALONE, "In place of `later`, without new answers of others, with {question}.")
    quote: str = text_option(
        "Agent {number}:\n```\n{text}\n```",
        "An answer of another agent in {{others}}, with {number} (counted from 1), {name} and {text}.",
    )
    separator: str = option("\n\n", "Stands between the quotes.")
    feedback: Literal["none", "label", "verifier"] = option(
        "none",
        "none, label or verifier: the reward source whose score of an answer is shown to its author and the others "
        "before the next turn.",
    )
    words: Feedback = option(
        help="The texts of the feedback: verdicts, own, others and explanation.",
        factory=Feedback,
    )
    consensus: Consensus | None = option(
        None,
        "End a question early if the agents agree: {share: 0.8, score: 0.7, from_update: 1}.",
    )
    end_above: Finite | None = option(
        None,
        "End a question early, in training, after a turn whose answers have a mean score above this (CoMLRL's "
        "early_termination_threshold).",
    )
    summariser: str | None = option(
        None,
        "An agent that condenses the answers of the others for each agent before they are shown. It does not "
        "debate itself.",
    )
    summary: str = text_option(
        "Condense these answers to the question below: what they conclude, and why.\n\n{others}\n\nQuestion: "
        "{question}",
        "What the summariser is asked, with {others} and {question}.",
    )
    speaks: dict[str, tuple[int, ...]] = option(
        {},
        "The turns, from 1, in which single agents speak: {bob: [1, 3]}. In its other turns an agent is silent. "
        "When it speaks again, it is shown the last answer that each of the others has given since then.",
    )
    pass_: str | None = option(
        None,
        "The word by which an agent declines: an answer that is this word only is not shown to others. The texts must "
        "tell the agents so. Consensus counts those who answered in the turn.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_speaks(self.speaks, self.turns)
        if self.summariser in self.speaks:
            raise ValueError(f"speaks: {self.summariser!r} is the summariser, which does not debate itself; remove it")

    simultaneous = True

    @property
    def every_step_scored(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether every step ends with an answer.

        It is false with a summariser, whose summaries are steps of their own, and if agents may decline.
        """
        return self.summariser is None and self.pass_ is None

    @property
    def score_between_turns(self) -> bool:  # type: ignore[override]  # it follows from the options
        """True if scores decide whether it ends."""
        return self.consensus is not None or self.end_above is not None

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

    def mentioned(self) -> set[str]:
        """Return the agents that ``speaks`` names."""
        return set(self.speaks)

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that these agents can play it.

        Raises:
            ValueError: nobody speaks in a turn.
        """
        super().check_players(players)
        check_somebody_speaks(self.speaks, [name for name in players if name != self.summariser], self.turns)

    def mark_passes(self, said: Sequence[Utterance]) -> None:
        """Mark the new answers by which agents declined. The summariser cannot decline."""
        mark_passes(said, self.pass_, exempt=self.summariser)

    def at_update(self, update: int) -> "Debate":
        """Return the debate as it is played in ``update``, counted from 1: without consensus before its first
        update."""
        early = self.consensus is not None and update < self.consensus.from_update
        return replace(self, consensus=None) if early else self

    def in_evaluation(self) -> "Debate":
        """Return the debate of evaluations, in which no score ends it early."""
        return replace(self, end_above=None)

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the debate. The outcome is "consensus" or "enough" if the question ended early, else None."""
        debaters = [a for a in agents if a != self.summariser]
        heard = Heard(debaters)
        said: list[Utterance] = []
        for turn in range(self.turns):
            if self.consensus is not None and self.consensus.reached(answered(said)):
                return "consensus"
            if turn and self._enough(said):
                return "enough"
            speaking = speakers_of(self.speaks, debaters, turn)
            summaries: dict[str, Utterance] = {}
            if self.summariser is not None and (shown := [a for a in speaking if heard.news[a]]):
                summaries = yield from self._summaries(self.summariser, shown, example.question, heard)
            said = yield [self._ask(a, turn, example.question, heard, summaries.get(a)) for a in speaking]
            heard.take(said)
        return None

    def _enough(self, said: list[Utterance]) -> bool:
        """Return whether the answers of a turn are good enough to end with."""
        if self.end_above is None:
            return False
        # none where a check plays without a reward
        scores = [u.rewards["score"] for u in answered(said) if "score" in u.rewards]
        return bool(scores) and exceeds(fmean(scores), self.end_above)

    def _ask(self, agent: str, turn: int, question: str, heard: "Heard", summary: Utterance | None) -> Ask:
        """Return the ask that shows ``agent`` the other answers, or their summary, before its next answer."""
        others, mine = heard.news[agent], heard.last.get(agent)
        if others:
            shown = summary.text if summary is not None else self._quotes(others)
            text = self.later.format(question=question, others=shown)
        else:
            text = (self.opening if mine is None else self.alone).format(question=question)
        if mine is not None and (told := self.words.tell(self.words.own, mine, self.feedback)):
            text = "\n\n".join([f"{told} {self.words.explanation}".strip(), text])
        parents = (summary.id,) if summary is not None else tuple([u.id for u in others])
        message = {"role": "user", "content": text}
        return Ask(agent, [message], parents=parents, turn=turn if self.speaks else None)

    def _quotes(self, others: list[Utterance]) -> str:
        quotes = []
        for number, u in enumerate(others, 1):
            quote = self.quote.format(number=number, name=u.agent, text=u.words())
            told = self.words.tell(self.words.others, u, self.feedback)
            quotes.append(f"{quote}\n{told}" if told else quote)
        return self.separator.join(quotes)

    def _summaries(
        self, summariser: str, agents: list[str], question: str, heard: "Heard"
    ) -> Generator[list[Ask], list[Utterance], dict[str, Utterance]]:
        """Return the words of the ``summariser`` for each of the ``agents``."""
        requests = []
        for agent in agents:
            others = heard.news[agent]
            text = self.summary.format(question=question, others=self._quotes(others))
            requests.append(
                Ask(
                    summariser,
                    user_says(text),
                    role="summariser",
                    parents=tuple(u.id for u in others),
                    answers=False,
                    fresh=True,
                )
            )
        summaries = yield requests
        return dict(zip(agents, summaries, strict=True))


class Heard:
    """The messages that each debater has not been shown yet, and its last answer.

    Args:
        debaters: the agents, in order.
    """

    def __init__(self, debaters: list[str]):
        self.news: dict[str, list[Utterance]] = {agent: [] for agent in debaters}
        self.last: dict[str, Utterance] = {}

    def take(self, said: list[Utterance]) -> None:
        """Take the words of a turn. Those who spoke in it had been shown all news before."""
        spoken = {u.agent: u for u in said}
        self.last |= spoken
        new = {u.agent: u for u in answered(said)}
        for agent, news in self.news.items():
            latest = new if agent in spoken else {u.agent: u for u in news} | new
            self.news[agent] = [latest[other] for other in self.news if other in latest and other != agent]
