"""Prover-verifier games and their decoupled form: what a verifier pays provers and translators. No torch."""

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

from maporl.config.schema import RewardSection
from maporl.rewards.base import FunctionSource, RewardSource, Values
from maporl.rewards.build import Voices
from maporl.rewards.rules import Credits, Rule
from maporl.rewards.scoring import grade_answers
from maporl.rounding import deviations
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Prove(Rule):
    """Pays an answer by what the verifier thinks of it and by whether it is right (arXiv 2407.13692).

    V is the logit of an utterance's score, and V' is V less its mean over the question's utterances in the same role. c
    is 1 if the answer is right, and h is 1 unless it was given in a ``sneaky`` role, whose task is to pass a wrong
    answer. An answer that cannot be graded counts as wrong.

    Under ``src`` a helpful wrong answer with a small V' loses less than a helpful right one below the mean.
    """

    form: Literal["src", "cgc"] = option(
        "src",
        "How an answer is paid, where V is the verifier's logit, V' is V less its mean, c is 1 for a right answer and "
        "h is 0 in a sneaky role. src pays (2c - 1)(2h - 1) V' where V' is above 0 by more than rounding, and -1 "
        "elsewhere. cgc pays V where c equals h, and `otherwise` elsewhere.",
    )
    sneaky: tuple[str, ...] = option(("sneaky",), "The sneaky roles.")
    otherwise: float = option(-2.0, "What cgc pays where c and h differ.")

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        logits = [{key: _logit(value) for key, value in credit.items()} for credit in credits]
        said = [[u for u in d.utterances if u.id in logit] for d, logit in zip(dialogues, logits, strict=True)]
        by_role: dict[str, list[float]] = defaultdict(list)
        for utterances, logit in zip(said, logits, strict=True):
            for u in utterances:
                by_role[u.role or u.agent].append(logit[u.id])
        above = {role: iter(deviations(values)) for role, values in by_role.items()}
        return [
            {u.id: self._paid(u, logit[u.id], next(above[u.role or u.agent])) for u in utterances}
            for utterances, logit in zip(said, logits, strict=True)
        ]

    def _paid(self, u: Utterance, value: float, above: float) -> float:
        right = _right(u)
        helpful = (u.role or u.agent) not in self.sneaky
        if self.form == "cgc":
            return value if right == helpful else self.otherwise
        return (above if right == helpful else -above) if above > 0 else -1.0


@dataclass(frozen=True)
class Translate(Rule):
    """Pays a translation of an answer by what the verifier thinks of it (arXiv 2602.23248, section 2.3).

    A translation is an answer that was shown another one, such as a solver's. V' is the logit of its score, minus the
    mean and divided by the standard deviation of all translations of the same answer in the same role. The task of a
    ``sneaky`` role is to give a wrong answer, and that of any other role to keep the answer that it was shown, by the
    reward ``faithful``. Who misses this task earns ``misaligned``. Otherwise a translation earns ``unconvincing`` where
    V' is not above 0 by more than rounding. A sneaky one above 0 earns V'. Any other one above 0 earns V' if the answer
    that it was shown is right, and -V' if it is wrong.

    An answer that cannot be graded counts as wrong. The rule credits translations alone. A single translation of an
    answer is never convincing, so fork after the answer (``fork_every``).
    """

    sneaky: tuple[str, ...] = option(("sneaky",), "The sneaky roles.")
    misaligned: float = option(-2.0, "What a translation earns that misses its task.")
    unconvincing: float = option(-2.0, "What one earns that does not convince the verifier.")
    ddof: Literal[0, 1] = option(1, "1 for the unbiased standard deviation, 0 for the population's.")

    along = "question"

    @property
    def reads(self) -> frozenset[str]:
        """``faithful``, which says whether an answer is the one that it was shown."""
        return frozenset({"faithful"})

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        groups: dict[Hashable, list[tuple[int, Utterance, Utterance]]] = defaultdict(list)
        for number, (dialogue, credit) in enumerate(zip(dialogues, credits, strict=True)):
            for u in (u for u in dialogue.utterances if u.id in credit):
                if (shown := _shown_answer(dialogue, u)) is not None:
                    which = (dialogue.rollout, shown.id) if shown.sample is None else shown.sample
                    groups[u.role or u.agent, which].append((number, u, shown))
        paid: Credits = [{} for _ in dialogues]
        for group in groups.values():
            values = self._normalised([_logit(credits[number][u.id]) for number, u, _ in group])
            for (number, u, shown), value in zip(group, values, strict=True):
                paid[number][u.id] = self._paid(u, shown, value)
        return paid

    def _normalised(self, values: list[float]) -> list[float]:
        above = deviations(values)
        if not any(above):
            return above
        spread = math.sqrt(math.fsum(d * d for d in above) / (len(above) - self.ddof))
        return [d / spread for d in above]

    def _paid(self, u: Utterance, shown: Utterance, value: float) -> float:
        sneaky = (u.role or u.agent) in self.sneaky
        aligned = not _right(u) if sneaky else u.rewards.get("faithful") == 1.0
        if not aligned:
            return self.misaligned
        if value <= 0:
            return self.unconvincing
        return value if sneaky or _right(shown) else -value


def faithful(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for an answer that says the same as the answer that it was shown, right or wrong, and 0 for another one.

    The task's grader compares them, with the shown answer as the label (faithfulness of arXiv 2602.23248, section 2.1).
    The value is 0 if no final answer can be read in one of the two. What was shown no answer has no value.
    """
    grade_answers(dialogues, task)
    return [[_same_as_shown(d, u, task) for u in d.utterances] for d in dialogues]


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the source ``faithful``: whether an answer is the one that it was shown (arXiv 2602.23248)."""
    return FunctionSource(faithful)


def _same_as_shown(dialogue: Dialogue, utterance: Utterance, task: Task) -> float | None:
    shown = _shown_answer(dialogue, utterance) if utterance.answers else None
    if shown is None:
        return None
    answer = None if shown.grade is None else shown.grade.answer
    if answer is None:
        return 0.0
    return float(task.grade(replace(dialogue.asked(utterance), answer=answer), utterance.words()).correct is True)


def _shown_answer(dialogue: Dialogue, utterance: Utterance) -> Utterance | None:
    """Return the last answer whose words the utterance was shown, or None."""
    shown = [u for u in dialogue.utterances if u.id in utterance.parents and u.answers]
    return shown[-1] if shown else None


def _right(u: Utterance) -> bool:
    return u.grade is not None and u.grade.correct is True


def _logit(score: float) -> float:
    """Return the output of which the score is the sigmoid; a score rounded to 0 or 1 counts as nearly that."""
    bounded = min(max(score, 1e-6), 1 - 1e-6)
    return math.log(bounded / (1 - bounded))
