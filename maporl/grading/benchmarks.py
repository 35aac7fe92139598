r"""Grading answers of mathematics benchmarks, each of which writes its labels in its own way.

Every rule is a doctest.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from maporl.grading.answers import (
    LONGEST_LABEL,
    canonical,
    option,
    reading,
    right_hand_side,
    same_answer,
    stated,
    too_long,
    written_answer,
)
from maporl.grading.numbers import plain
from maporl.grading.values import Budget, paired, real_value
from maporl.types import Grade

MOST_LISTED = 32
"""The most answers of a question that has several. OlympiadBench has up to 16."""
_BOXED = re.compile(r"\\(?:boxed|fbox|framebox|bbox)(?![A-Za-z])")


def grade_benchmark(text: str, truth: str, meta: Mapping[str, Any] | None = None) -> Grade:
    r"""Grade a worked answer against the label of a benchmark.

    ``meta`` may hold two columns of OlympiadBench: ``is_multiple_answer`` (the label lists several answers, in any
    order) and ``error`` (how far a number may be off). A label that is neither a number nor mathematics is compared as
    it is written, but for typesetting. Where the label is an option, a date, a time of day, a set or the like, or
    words, the statement that a text marks tells it if it holds no other thing of that kind, and if no word beside it
    denies or changes it.

    >>> grade_benchmark(r"thus \boxed{2, 1}", "1, 2", {"is_multiple_answer": True}).correct
    True
    >>> grade_benchmark(r"\boxed{3.14}", r"3.1416", {"error": "0.01"}).correct, grade_benchmark(r"\boxed{3.14}", "3.1416").correct
    (True, False)
    >>> grade_benchmark(r"\boxed{1e-5}", "10^{-5}").correct, grade_benchmark(r"\boxed{3.83e35}", r"3.83 \times 10^{35}").correct
    (True, True)
    >>> grade_benchmark(r"\boxed{nylevE}", "Evelyn").correct, grade_benchmark(r"\boxed{\text{evelyn}}", "Evelyn").correct
    (False, True)
    >>> grade_benchmark(r"\boxed{E}", r"\text{(E)},").correct, grade_benchmark(r"\boxed{\frac{12}{5525}}", r"\frac{12}{5,\!525}").correct
    (True, True)
    >>> grade_benchmark("I cannot say.", "7").correct, grade_benchmark("Answer: Evelyn", "Evelyn").correct
    (False, True)
    >>> [grade_benchmark(f"Answer: It was signed {when} 2019.", "2019-11-05").correct for when in ("on 5 November", "after 5 November")]
    [True, False]
    """  # noqa: E501
    if len(truth) > LONGEST_LABEL:
        return Grade(None, None, too_long(truth))
    meta = meta or {}
    if meta.get("is_multiple_answer") and len(_listed(truth)) > MOST_LISTED:
        return Grade(None, None, f"the label lists more than {MOST_LISTED} answers")
    answer = written_answer(text)
    correct = answer is not None and _is_right(answer, truth, meta)
    if not correct and (told := stated(text, truth)):
        in_words = reading(truth) is None and option(truth) is None and not _BOXED.search(text)
        correct = bool(same_answer(told, truth))
        answer = told if correct or in_words else answer
    if answer is None:
        return Grade(None, False, "no final answer in the asked form")
    reason = "equals the label" if correct else "differs from the label"
    return Grade(canonical(right_hand_side(answer)), correct, reason)


def _is_right(answer: str, truth: str, meta: Mapping[str, Any]) -> bool:
    """Whether an answer, or each of several in any order, is the label's."""
    alike = partial(same_answer, budget=Budget())
    several = bool(meta.get("is_multiple_answer")) and paired(_listed(answer), _listed(truth), alike)
    return several or _within(answer, truth, meta) or bool(same_answer(answer, truth))


def _listed(text: str) -> list[str]:
    """The parts of ``text`` between the commas that stand outside of all brackets."""
    parts, depth, part = [], 0, ""
    for character in plain(text).replace(" and ", ","):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    return [p.strip() for p in (*parts, part) if p.strip()]


def _within(answer: str, truth: str, meta: Mapping[str, Any]) -> bool:
    """Whether two numbers differ by no more than the label's ``error``."""
    trees = [reading(text) for text in (str(meta["error"]), answer, truth)] if meta.get("error") else [None]
    values = [tree and real_value(tree[0]) for tree in trees]
    return all(values) and abs(values[1][0] - values[2][0]) <= values[0][0]  # type: ignore[index]  # none is None
