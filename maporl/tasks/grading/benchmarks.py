r"""Grading answers of mathematics benchmarks, each of which writes its labels in its own way. Every rule is a doctest."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from maporl.tasks.grading.answers import LONGEST_LABEL, final_answer, same_answer, too_long
from maporl.tasks.grading.numbers import LONGEST_ANSWER, canonical, number, plain
from maporl.tasks.grading.symbolic import Allowance
from maporl.types import Grade

_SCIENTIFIC = re.compile(
    r"([-+]?(?:\d+(?:\.\d+)?|\.\d+))(?:\s*(?:\\times|\\cdot|[*x×·])\s*10\^\{?\s*([-+]?\d+)\s*\}?|[eE]([-+]?\d+))"
)
_TEN = re.compile(r"10\^\{?\s*([-+]?\d+)\s*\}?")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_LARGEST_EXPONENT = 400
MOST_LISTED = 32
"""The most answers of a question that has several. OlympiadBench has up to 16."""


def grade_benchmark(text: str, truth: str, meta: Mapping[str, Any] | None = None) -> Grade:
    r"""Grade a worked answer against the label of a benchmark.

    ``meta`` may hold two columns of OlympiadBench: ``is_multiple_answer`` (the label lists several answers, in any order)
    and ``error`` (how far a number may be off). A label that is neither a number nor mathematics is compared as text, by
    its letters and digits only.

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
    >>> grade_benchmark("I cannot say.", "7").correct
    False

    Raises:
        MathematicsError: the process that compares mathematics cannot work here.
    """
    if len(truth) > LONGEST_LABEL:
        return Grade(None, None, too_long(truth))
    meta = meta or {}
    if meta.get("is_multiple_answer") and len(_listed(_tidy(truth))) > MOST_LISTED:
        return Grade(None, None, f"the label lists more than {MOST_LISTED} answers")
    answer = final_answer(text)
    if answer is None:
        return Grade(None, False, "no final answer in the asked form")
    correct = _same(answer, truth, meta)
    return Grade(canonical(answer), correct, "equals the label" if correct else "differs from the label")


def _same(answer: str, truth: str, meta: Mapping[str, Any]) -> bool:
    answer, truth = _tidy(answer), _tidy(truth)
    if tolerance := _tolerance(meta):
        mine, theirs = scientific(answer), scientific(truth)
        if mine is not None and theirs is not None:
            return abs(mine - theirs) <= tolerance
    if meta.get("is_multiple_answer"):
        return _same_set(_listed(answer), _listed(truth))
    return _equal(answer, truth, Allowance())


def _equal(answer: str, truth: str, allowance: Allowance) -> bool:
    mine, theirs = scientific(answer), scientific(truth)
    if mine is not None and theirs is not None:
        return mine == theirs
    verdict = same_answer(answer, truth, allowance)
    return _letters(answer) == _letters(truth) != "" if verdict is None else verdict


def _same_set(answers: list[str], truths: list[str]) -> bool:
    """Whether the answers can be paired with the labels, each with an equal one and with none left over."""
    if len(answers) != len(truths):
        return False
    left, allowance = list(truths), Allowance()
    for answer in answers:
        met = next((i for i, truth in enumerate(left) if _equal(answer, truth, allowance)), None)
        if met is None:
            return False
        del left[met]
    return not left


def scientific(text: str) -> Fraction | None:
    r"""The number that ``text`` stands for, also in scientific notation, or None if it is not a number.

    >>> [str(scientific(t)) for t in ("1e-2", r"2.5 \times 10^{3}", "10^{-1}", "7", "x")]
    ['1/100', '2500', '1/10', '7', 'None']
    """
    if len(text) > 2 * LONGEST_ANSWER:
        return None
    text = plain(text).strip()
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match[2] or match[3])
        return Fraction(match[1]) * Fraction(10) ** exponent if abs(exponent) <= _LARGEST_EXPONENT else None
    if match := _TEN.fullmatch(text):
        return Fraction(10) ** int(match[1]) if abs(int(match[1])) <= _LARGEST_EXPONENT else None
    return number(text)


def _tidy(text: str) -> str:
    """``text`` without typesetting that means nothing."""
    text = text.strip().replace(r",\!", "").replace(r"\!", "").strip("$").rstrip(".,; ").strip()
    only = _TEXT.fullmatch(text)
    return only[1].strip("() ") if only else text


def _listed(text: str) -> list[str]:
    """The parts of ``text`` between the commas that stand outside of all brackets."""
    parts, depth, part = [], 0, ""
    for character in text.replace(r"\text{ and }", ",").replace(" and ", ","):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    return [p.strip().strip("$").strip() for p in (*parts, part) if p.strip()]


def _letters(text: str) -> str:
    return "".join(c for c in _TEXT.sub(r"\1", text).lower() if c.isalnum())


def _tolerance(meta: Mapping[str, Any]) -> Fraction | None:
    return scientific(str(meta.get("error") or ""))
