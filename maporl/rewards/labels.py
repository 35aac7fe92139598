"""Rewards from the task's own grader: right or wrong, readable, near. Imports no torch."""

from fractions import Fraction

from maporl.rewards.base import Values
from maporl.rewards.scoring import grade_answers
from maporl.tasks.base import Task
from maporl.tasks.grading.numbers import number
from maporl.types import Dialogue


def label(dialogues: list[Dialogue], task: Task) -> Values:
    """1 for a right answer, 0 for a wrong one, by the task's grader; every answer's grade is kept on it."""
    grade_answers(dialogues, task)
    return [
        [None if u.grade is None or u.grade.correct is None else float(u.grade.correct) for u in d.utterances]
        for d in dialogues
    ]


def readable(dialogues: list[Dialogue], task: Task) -> Values:
    """1 for an answer in the asked form, right or wrong, 0 for one in which none could be found."""
    grade_answers(dialogues, task)
    return [[None if u.grade is None else float(u.grade.answer is not None) for u in d.utterances] for d in dialogues]


def near(dialogues: list[Dialogue], task: Task) -> Values:
    """How near a numeric answer is to the label, in [0, 1]: ``1 / (1 + |a - b| / max(1, |b|))``; 0 where it is no number."""
    grade_answers(dialogues, task)

    def nearness(answer: str | None, truth: str) -> float:
        said, label = (None if text is None else number(text) for text in (answer, truth))
        if said is None or label is None:
            return 0.0
        return float(1 / (1 + abs(said - label) / max(Fraction(1), abs(label))))

    return [[nearness(u.grade.answer if u.grade else None, d.example.answer) for u in d.utterances] for d in dialogues]
