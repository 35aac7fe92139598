"""Grading: find the final answer an author committed to, normalise it, compare it."""

from maporl.grading.answers import boxed, final_answer, grade_mathematics, same_answer
from maporl.grading.labels import find_label, grade_label
from maporl.grading.numbers import canonical, number

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
