"""Collaboration: one agent only helps another agent to answer (AgentPO; iGRPO's drafts; Agent-RLVR's guidance)."""

from dataclasses import dataclass, replace
from typing import Literal

from maporl.protocols.base import Play, Protocol
from maporl.text import text_option
from maporl.types import Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Positive, option

HINT = "{question}\n\nDo not solve this. Give a hint that helps someone else to solve it."
WITH_HINT = "{question}\n\nHint: {words}"
CRITIQUE = (
    "{question}\n\nAn answer to this:\n{draft}\n\nSay what is wrong with it, or what to check. Do not solve it "
    "yourself."
)
REVISE = "Someone's remarks on your answer:\n{words}\n\nAnswer again.\n\n{question}"


@dataclass(frozen=True)
class Collaboration(Protocol):
    """A ``collaborator`` helps an ``actor``.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    mode: Literal["hint", "critic"] = option(
        "hint",
        "hint: the collaborator gives a hint on the question, and the actor answers with it. critic: the actor "
        "answers, the collaborator criticises the answer, and the actor answers again.",
    )
    collaborator: str | None = option(None, "The agent that helps. Default: the first one.")
    actor: str | None = option(None, "The agent that answers. Default: the second one.")
    opening: str = text_option("{question}", "What the actor is asked before it is criticised, with {question!}.")
    hint: str = text_option(
        HINT,
        "What the collaborator is asked for a hint, with {question!} and {reference}, the right answer, which a "
        "teacher knows and the actor does not.",
    )
    with_hint: str = text_option(
        WITH_HINT, "What the actor is asked with a hint, with {question} and {words!}, those of the collaborator."
    )
    critique: str = text_option(
        CRITIQUE, "What the collaborator is asked about an answer, with {question}, {draft!} and {reference}."
    )
    revise: str = text_option(REVISE, "What the actor is asked with a critique, with {question} and {words!}.")
    when: Literal["always", "wrong", "never"] = option(
        "always",
        "Whether an answer is criticised: always, only if it is wrong, or never. With wrong nobody helps in "
        "evaluations, because nobody knows there which answers are wrong (Agent-RLVR, arXiv 2506.11425).",
    )
    rounds: Positive = option(
        1,
        "How often a critic speaks and the actor answers again. A critic who knows the answer is a simulated user, "
        "whom the actor asks before it answers (SWEET-RL, arXiv 2503.15478).",
    )
    every_step_scored = False

    least_players = 2

    def __post_init__(self):
        super().__post_init__()
        if self.mode == "hint" and self.when != "always":
            raise ValueError(f"when: {self.when} is about an answer that is criticised; set mode: critic, or remove it")
        if self.rounds > 1 and self.mode == "hint":
            raise ValueError(f"rounds: a hint is given once, got {self.rounds}; set mode: critic, or remove it")

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The number of answers of the actor."""
        return 1 if self.mode == "hint" or self.when == "never" else 1 + self.rounds

    @property
    def grade_between_turns(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether it must know which answers are wrong."""
        return self.when == "wrong"

    def in_evaluation(self) -> "Collaboration":
        """Return the protocol of evaluations, in which wrong answers get no help."""
        return replace(self, when="never") if self.when == "wrong" else self

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.collaborator, self.actor) if name is not None}

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play hint and answer, or an answer, and critique and answer in rounds.

        The outcome is "unaided" if an answer got no critique.
        """
        helper = self.collaborator or next(a for a in agents if a != self.actor)
        actor = self.actor or next(a for a in agents if a != helper)
        values = {"question": example.question, "reference": example.answer}
        if self.mode == "hint":
            words = yield [_ask(helper, self.hint.format(**values), answers=False)]
            yield [_ask(actor, self.with_hint.format(question=example.question, words=words[0].words()), words)]
            return None
        draft = yield [_ask(actor, self.opening.format(question=example.question))]
        for number in range(self.rounds):
            if self.when == "never" or (self.when == "wrong" and _right(draft[0])):
                return None if number else "unaided"
            words = yield [_ask(helper, self.critique.format(draft=draft[0].words(), **values), draft, answers=False)]
            draft = yield [_ask(actor, self.revise.format(question=example.question, words=words[0].words()), words)]
        return None


def _right(said: Utterance) -> bool:
    return said.grade is not None and said.grade.correct is True


def _ask(agent: str, text: str, parents: list[Utterance] | None = None, answers: bool = True) -> Ask:
    ids = tuple(u.id for u in parents or ())
    return Ask(agent, user_says(text), parents=ids, answers=answers)
