r"""Grading: find the final answer of a text, bring it into one form, and compare it with the label.

A label is read whole or not at all. An answer is right if a careful reader would take it for the label, in another form
too; where nobody could say so, the verdict is None::

    >>> from maporl.grading import final_answer, grade_label, grade_mathematics, same_answer
    >>> grade_mathematics(r"She sells 9 eggs, so \boxed{\$18}.", "18")
    Grade(answer='18', correct=True, reason='equals the label')
    >>> grade_mathematics("Answer: 18. No, that is wrong; it should be 17.", "18").correct
    False
    >>> same_answer(r"\frac{1}{2}", "0.5"), same_answer("x", r"\{x : x > 1\}"), final_answer("#### 1,234")
    (True, False, '1,234')
    >>> grade_label("It is not neutral, but a contradiction.", "contradiction", ["neutral", "contradiction"]).correct
    True

:mod:`maporl.grading.benchmarks` grades as the label's kind says, and :mod:`maporl.grading.spans` compares words.
Nothing here runs what it reads, imports torch, or takes longer for a hostile text than for its length.
"""

from maporl.grading.answers import LONGEST_LABEL as LONGEST_LABEL
from maporl.grading.answers import LONGEST_TEXT as LONGEST_TEXT
from maporl.grading.answers import canonical as canonical
from maporl.grading.answers import final_answer as final_answer
from maporl.grading.answers import grade_mathematics as grade_mathematics
from maporl.grading.answers import label_of as label_of
from maporl.grading.answers import same_answer as same_answer
from maporl.grading.labels import find_label as find_label
from maporl.grading.labels import grade_label as grade_label
from maporl.grading.numbers import number as number
