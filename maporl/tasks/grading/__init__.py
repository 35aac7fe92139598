"""Grading: find the final answer an author committed to, normalise it, compare it."""

from maporl.tasks.grading.answers import boxed, final_answer, grade_mathematics, same_answer
from maporl.tasks.grading.labels import find_label, grade_label
from maporl.tasks.grading.numbers import canonical, number

__all__ = [
    "boxed",
    "canonical",
    "final_answer",
    "find_label",
    "grade_label",
    "grade_mathematics",
    "number",
    "same_answer",
]
