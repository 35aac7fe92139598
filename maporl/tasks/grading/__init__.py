"""Grading: find the final answer of a text, bring it into one form, and compare it with the label."""

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
