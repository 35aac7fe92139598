"""Collaboration: one agent only helps another agent to answer (AgentPO; iGRPO's drafts)."""

from dataclasses import dataclass
from typing import Literal

from maporl.protocols.base import Play, Protocol, check_template
from maporl.types import Ask, Example, Utterance

HINT = "{question}\n\nDo not solve this. Give a hint that helps someone else to solve it."
WITH_HINT = "{question}\n\nHint: {words}"
CRITIQUE = "{question}\n\nAn answer to this:\n{draft}\n\nSay what is wrong with it, or what to check. Do not solve it yourself."
REVISE = "Someone's remarks on your answer:\n{words}\n\nAnswer again.\n\n{question}"


@dataclass(frozen=True)
class Collaboration(Protocol):
    """A ``collaborator`` helps an ``actor``. By default these are the first and the second agent.

    With ``mode="hint"`` the collaborator gives a hint on the question (``hint``), and the actor answers with it
    (``with_hint``). With ``mode="critic"`` the actor answers (``opening``), the collaborator criticises the answer
    (``critique``), and the actor answers again (``revise``). The texts may use ``{question}``, the ``{words}`` of the
    collaborator and the ``{draft}``.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    mode: Literal["hint", "critic"] = "hint"
    collaborator: str | None = None
    actor: str | None = None
    opening: str = "{question}"
    hint: str = HINT
    with_hint: str = WITH_HINT
    critique: str = CRITIQUE
    revise: str = REVISE
    every_step_scored = False

    least_players = 2

    def __post_init__(self):
        super().__post_init__()
        check_template("opening", self.opening, {"question"}, {"question"})
        check_template("hint", self.hint, {"question"}, {"question"})
        check_template("with_hint", self.with_hint, {"question", "words"}, {"words"})
        check_template("critique", self.critique, {"question", "draft"}, {"draft"})
        check_template("revise", self.revise, {"question", "words"}, {"words"})

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The number of answers of the actor."""
        return 1 if self.mode == "hint" else 2

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.collaborator, self.actor) if name is not None}

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play hint and answer, or answer, critique and answer."""
        helper = self.collaborator or next(a for a in agents if a != self.actor)
        actor = self.actor or next(a for a in agents if a != helper)
        draft: list[Utterance] = []
        if self.mode == "critic":
            draft = yield [_ask(actor, self.opening.format(question=example.question))]
        text = self.hint.format(question=example.question)
        if draft:
            text = self.critique.format(question=example.question, draft=draft[0].words())
        words = yield [_ask(helper, text, draft, answers=False)]
        template = self.revise if draft else self.with_hint
        yield [_ask(actor, template.format(question=example.question, words=words[0].words()), words)]


def _ask(agent: str, text: str, parents: list[Utterance] | None = None, answers: bool = True) -> Ask:
    ids = tuple(u.id for u in parents or ())
    return Ask(agent, [{"role": "user", "content": text}], parents=ids, answers=answers)
