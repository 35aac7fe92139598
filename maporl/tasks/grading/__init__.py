"""Grading: find the final answer of a text, bring it into one form, and compare it with the label."""

from maporl.tasks.grading.answers import canonical as canonical
from maporl.tasks.grading.answers import final_answer as final_answer
from maporl.tasks.grading.answers import grade_mathematics as grade_mathematics
from maporl.tasks.grading.answers import same_answer as same_answer
from maporl.tasks.grading.labels import find_label as find_label
from maporl.tasks.grading.labels import grade_label as grade_label
from maporl.tasks.grading.numbers import number as number
