"""The reward of a prover that a verifier pays (prover-verifier games, Kirchner et al. 2024). Pure Python, no torch."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from maporl.rewards.rule import Credits, Rule
from maporl.rounding import deviations
from maporl.types import Dialogue, Utterance


@dataclass(frozen=True)
class Prove(Rule):
    """Pays an answer by what the verifier thinks of it and by whether it is right (arXiv 2407.13692).

    V is the logit of an utterance's score, and V' is V less its mean over the question's utterances in the same role. c is 1 if
    the answer is right, and h is 1 unless it was given in a ``sneaky`` role, whose task is to pass a wrong answer. ``src`` pays
    ``(2c - 1)(2h - 1) V'`` where V' is above 0 by more than rounding, and -1 elsewhere. ``cgc`` pays V where c equals h, and ``otherwise`` elsewhere. An answer that
    cannot be graded counts as wrong.

    Under ``src`` a helpful wrong answer with a small V' loses less than a helpful right one below the mean.
    """

    form: Literal["src", "cgc"] = "src"
    sneaky: tuple[str, ...] = ("sneaky",)
    otherwise: float = -2.0

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        logits = [{key: _logit(value) for key, value in own.items()} for own in credits]
        said = [[u for u in d.utterances if u.id in own] for d, own in zip(dialogues, logits, strict=True)]
        by_role: dict[str, list[float]] = defaultdict(list)
        for utterances, own in zip(said, logits, strict=True):
            for u in utterances:
                by_role[u.role or u.agent].append(own[u.id])
        above = {role: iter(deviations(values)) for role, values in by_role.items()}
        return [
            {u.id: self._paid(u, own[u.id], next(above[u.role or u.agent])) for u in utterances}
            for utterances, own in zip(said, logits, strict=True)
        ]

    def _paid(self, u: Utterance, value: float, above: float) -> float:
        right = u.grade is not None and u.grade.correct is True
        helpful = (u.role or u.agent) not in self.sneaky
        if self.form == "cgc":
            return value if right == helpful else self.otherwise
        return (above if right == helpful else -above) if above > 0 else -1.0


def _logit(score: float) -> float:
    """Return the verifier's output, of which the score is the sigmoid. One that is rounded to 0 or 1 counts as nearly that."""
    bounded = min(max(score, 1e-6), 1 - 1e-6)
    return math.log(bounded / (1 - bounded))
