"""Attempts: an answer is tried again and again, each time with the last answer and whether it was right (MARS²'s
refinement)."""

from dataclasses import dataclass, replace

from maporl.protocols.base import Play, Protocol
from maporl.text import text_option
from maporl.types import Ask, Example, user_says
from trl_ext.ppo.options import Positive, option

AGAIN = "{question}\n\nAn earlier answer:\n{draft}\n\nIt is {verdict}. Answer again, better."


@dataclass(frozen=True)
class Attempts(Protocol):
    """Agents answer in turn, ``rounds`` times in all. From the second answer on, each is shown the one before and its
    grade.

    No agent remembers anything else. In an evaluation one answer is given, because nobody tells there whether it is
    right.

    Any agent can give any answer. The branching ``tree_search`` decides who does, and which answer is tried again.

    Raises:
        ValueError: ``rounds`` is below 1, or a text lacks a placeholder or has an unknown one.
    """

    rounds: Positive = option(2, "Number of answers.")
    opening: str = text_option("{question}", "What the first agent is asked, with {question!}.")
    again: str = text_option(
        AGAIN,
        'What a later one is asked, with {question}, {draft!} and {verdict!}: "right", "wrong", or "ungraded" where no '
        "grade is known.",
    )
    any_agent = True
    grade_between_turns = True

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of answers that an agent gives."""
        return self.rounds

    def in_evaluation(self) -> "Attempts":
        """Return the protocol of evaluations, in which one answer is given."""
        return replace(self, rounds=1)

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome is the grade of the last answer: True, False, or None."""
        text, parents, right = self.opening.format(question=example.question), tuple[int, ...](), None
        for number in range(self.rounds):
            agent = agents[number % len(agents)]
            ask = Ask(agent, user_says(text), parents=parents, fresh=True)
            (draft,) = yield [ask]
            right = None if draft.grade is None else draft.grade.correct
            verdict = {True: "right", False: "wrong", None: "ungraded"}[right]
            text = self.again.format(question=example.question, draft=draft.words(), verdict=verdict)
            parents = (draft.id,)
        return right
