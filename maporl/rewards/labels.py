"""Reward sources that use the task's own grader: right or wrong, readable, near. Imports no torch."""

from fractions import Fraction

from maporl.rewards.base import Values
from maporl.rewards.scoring import grade_answers
from maporl.tasks.base import Task
from maporl.tasks.grading.numbers import number
from maporl.types import Dialogue


def label(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for a right answer and 0 for a wrong one. The answer keeps the grade that the task's grader gave it."""
    grade_answers(dialogues, task)
    return [
        [None if u.grade is None or u.grade.correct is None else float(u.grade.correct) for u in d.utterances]
        for d in dialogues
    ]


def readable(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for an answer that has a final answer in the required form, right or wrong, and 0 otherwise."""
    grade_answers(dialogues, task)
    return [[None if u.grade is None else float(u.grade.answer is not None) for u in d.utterances] for d in dialogues]


def near(dialogues: list[Dialogue], task: Task) -> Values:
    """Return how near a numeric answer a is to the label b, in [0, 1]: ``1 / (1 + |a - b| / max(1, |b|))``.

    The value is 0 if the answer or the label is not a number.
    """
    grade_answers(dialogues, task)

    def nearness(answer: str | None, truth: str) -> float:
        said, label = (None if text is None else number(text) for text in (answer, truth))
        if said is None or label is None:
            return 0.0
        return float(1 / (1 + abs(said - label) / max(Fraction(1), abs(label))))

    return [[nearness(u.grade.answer if u.grade else None, d.example.answer) for u in d.utterances] for d in dialogues]
