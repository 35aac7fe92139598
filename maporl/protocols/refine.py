"""Refine: an answer is checked and corrected until the verifier approves (Dr. MAS's solver and verifier; MALT)."""

from dataclasses import dataclass

from maporl.protocols.base import Play, Protocol
from maporl.text import matches, pattern_option, text_option
from maporl.types import Ask, Example, user_says
from trl_ext.ppo.options import Positive, option

VERIFY = (
    "{question}\n\nAn answer to this:\n{draft}\n\nCheck it. If it is right, end with <verify>approve</verify>; "
    "otherwise say what is wrong and end with <verify>reject</verify>."
)
MEND = "Your answer was not approved:\n{words}\n\nAnswer again.\n\n{question}"


@dataclass(frozen=True)
class Refine(Protocol):
    """The ``solver`` answers, the ``verifier`` judges the answer, and the ``refiner`` answers again, at most ``rounds``
    times.

    Nobody judges the last answer. A verdict is worth what the answer is worth that it approves, or else the answer that
    follows it. It also earns ``verdict_form``: 1 if ``form`` is found in it, and else 0.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    rounds: Positive = option(2, "How often an answer may be judged and given again.")
    solver: str | None = option(None, "The agent that answers first. Default: the first one.")
    verifier: str | None = option(None, "The agent that judges. Default: the second one.")
    refiner: str | None = option(None, "The agent that answers again. Default: the solver.")
    opening: str = text_option("{question}", "What the solver is asked, with {question!}.")
    verify: str = text_option(VERIFY, "What the verifier is asked, with {question} and {draft!}.")
    mend: str = text_option(MEND, "What the refiner is asked, with {question}, {draft} and the verdict's {words!}.")
    approval: str = pattern_option(
        r"<verify>\s*approve\s*</verify>",
        "A regular expression that is found in a verdict that approves, which ends the dialogue. Any other verdict "
        "does not approve.",
    )
    form: str = pattern_option(
        r"<verify>\s*(approve|reject)\s*</verify>",
        "A regular expression that is found in any verdict of the right form.",
    )
    every_step_scored = False
    roles = True
    pays = frozenset({"verdict_form"})

    least_players = 2

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of answers."""
        return self.rounds + 1

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.solver, self.verifier, self.refiner) if name is not None}

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome is "approved", or None if the rounds ran out."""
        solver = self.solver or next(a for a in agents if a not in (self.verifier, self.refiner))
        verifier = self.verifier or next(a for a in agents if a not in (solver, self.refiner))
        refiner = self.refiner or solver
        (draft,) = yield [Ask(solver, user_says(self.opening.format(question=example.question)), role="solver")]
        for _ in range(self.rounds):
            text = self.verify.format(question=example.question, draft=draft.words())
            (verdict,) = yield [Ask(verifier, user_says(text), role="verifier", parents=(draft.id,), answers=False)]
            verdict.rewards["verdict_form"] = float(any(matches(self.form, verdict.text, ignore_case=True)))
            if any(matches(self.approval, verdict.text, ignore_case=True)):
                verdict.settles = (draft.id,)
                return "approved"
            text = self.mend.format(question=example.question, words=verdict.text, draft=draft.words())
            role = "refiner" if refiner != solver else "solver"
            (draft,) = yield [Ask(refiner, user_says(text), role=role, parents=(verdict.id, draft.id))]
        return None
