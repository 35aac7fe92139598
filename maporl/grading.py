r"""Grading: find the final answer an author committed to, normalise it, compare it. Every rule is a doctest.

The grammar of a final answer is strict. In falling order of authority, the *last* of

1. ``\boxed{...}`` with balanced braces,
2. ``#### ...`` to the end of the line (GSM8K),
3. ``Answer: ...`` or ``the (final) answer is ...`` to the end of the sentence,
4. a text that is nothing but an answer, or nothing but an equation in numbers (its right-hand side).

Anything else has no final answer, which is not the same as a wrong one but is never right.
"""

import re
import threading
from collections.abc import Sequence
from fractions import Fraction

from maporl.types import Grade

_MARKED = re.compile(r"(?:\bfinal\s+answer\b|\banswer\b)\**\s*(?:is\b|=|:)\**\s*:?\s*(?P<answer>[^\n]*)", re.IGNORECASE)
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_WITH_UNIT = re.compile(
    rf"(?P<sign>-?)[$€£]?\s*(?P<number>{_NUMBER})\s*(?P<unit>%|(?:[^\W\d_]+[.²³]?(?:\s+|/|$)){{0,4}})", re.UNICODE
)
_FRACTION = re.compile(r"(?P<sign>[-+]?)\s*\\[dt]?frac\s*\{\s*(?P<top>-?\d+)\s*\}\s*\{\s*(?P<bottom>-?\d+)\s*\}")
_SLASH = re.compile(r"(?P<top>[-+]?\d+)\s*/\s*(?P<bottom>\d+)")
_EQUATION = re.compile(r"[\d\s.,$+\-*/x×·÷()=]+=(?P<right>[^=\n]+)")
_NEGATION = re.compile(
    r"(?:\bnot|\bneither|\bnor|n't|n’t|\bno|\brather than|\binstead of)(?:\s+(?:an?|the|really|simply))*\s*$"
)


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, braces balanced.

    >>> boxed(r"so \boxed{\frac{1}{2}} or rather \boxed{\sqrt{\frac{3}{4}}}")
    '\\sqrt{\\frac{3}{4}}'
    >>> boxed(r"cut off \boxed{12") is None
    True
    """
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for position in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : position].strip()
        start = text.rfind(r"\boxed{", 0, start)
    return None


def final_answer(text: str) -> str | None:
    r"""The final answer of ``text`` by the grammar above, as written; None where there is none.

    >>> final_answer("2 + 3 = 5\n#### 1,234")
    '1,234'
    >>> final_answer("The answer is 12 km. Yes.")
    '12 km'
    >>> final_answer("Answer: 3.5")
    '3.5'
    >>> final_answer(" 42. ")
    '42'
    >>> final_answer("2 + 3 = 5 apples"), final_answer("First 2 + 3 = 5, then I stop.")
    ('5 apples', None)
    """
    answer = boxed(text)
    if answer is None and (lines := re.findall(r"####[ \t]*([^\n]+)", text)):
        answer = lines[-1]
    if answer is None and (marks := list(_MARKED.finditer(text))):
        answer = _first_sentence(marks[-1]["answer"])
    if answer is None and number(text) is not None:
        answer = text
    if answer is None and (equation := _EQUATION.fullmatch(text.strip())) and number(equation["right"]) is not None:
        answer = equation["right"]
    return _trim(answer) or None if answer is not None else None


def number(text: str) -> Fraction | None:
    r"""The one number that ``text`` is, exactly; None if it is anything else.

    Thousands, decimals, currency, percent signs, fractions and a unit of up to four words are understood.

    >>> [str(number(t)) for t in ("1,234", "3.0", r"\frac{1}{2}", "-3/4", "$5", "12 red apples", r"7\%", "0.50")]
    ['1234', '3', '1/2', '-3/4', '5', '12', '7', '1/2']
    >>> [number(t) for t in ("2 + 3", "10-4", "1,23", "apples", "", "1 or 2", r"\frac{1}{0}")]
    [None, None, None, None, None, None, None]
    """
    text = _trim(re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1", text))
    text = text.replace(r"\%", "%").replace(r"\$", "$").replace(r"\!", "").replace(r"\,", " ").strip()
    if match := _FRACTION.fullmatch(text) or _SLASH.fullmatch(text):
        bottom = int(match["bottom"])
        sign = -1 if match.groupdict().get("sign") == "-" else 1
        return Fraction(sign * int(match["top"]), bottom) if bottom else None
    match = _WITH_UNIT.fullmatch(text)
    if not match or not re.search(r"\d", match["number"]):
        return None
    value = Fraction(match["number"].replace(",", ""))
    return -value if match["sign"] == "-" else value


def canonical(answer: str) -> str:
    r"""One spelling for equal answers, for votes and agreement.

    >>> canonical("1,234.0 dollars"), canonical(r"\frac{2}{4}"), canonical(" Paris. ")
    ('1234', '1/2', 'paris')
    """
    value = number(answer)
    return str(value) if value is not None else re.sub(r"\s+", " ", _trim(answer)).lower()


def same_answer(answer: str, truth: str) -> bool | None:
    r"""Whether two answers are equal: as exact numbers, else as mathematics (math-verify); None if ``truth`` is neither.

    >>> same_answer("0.5", r"\frac{1}{2}"), same_answer("2+3", "5"), same_answer(r"x^2+2x+1", r"(x+1)^2")
    (True, True, True)
    >>> same_answer("235", "5")
    False
    """
    if canonical(answer) == canonical(truth):
        return True
    if number(answer) is not None and number(truth) is not None:
        return False
    return _same_mathematics(answer, truth)


def grade_mathematics(text: str, truth: str) -> Grade:
    r"""Grade a worked answer against ``truth``.

    >>> grade_mathematics(r"... so \boxed{1{,}234}", "1234").correct, grade_mathematics("2 + 3 = 5 apples", "235").correct
    (True, False)
    """
    answer = final_answer(text)
    if answer is None:
        return Grade(None, False, "no final answer in the asked form")
    answer = answer.replace("{,}", ",")
    verdict = same_answer(answer, truth)
    reason = {True: "equals the label", False: "differs from the label", None: "the label cannot be read"}[verdict]
    return Grade(canonical(answer), verdict, reason)


def find_label(text: str, labels: Sequence[str]) -> str | None:
    """The one label that ``text`` asserts: whole words, the final answer if marked, negated mentions set aside.

    >>> nli = ("entailment", "neutral", "contradiction")
    >>> find_label("not entailment, it is a contradiction", nli)
    'contradiction'
    >>> find_label("It could be neutral.\\nAnswer: Entailment", nli)
    'entailment'
    >>> find_label("neutral or contradiction", nli) is None, find_label("contradictions abound", nli) is None
    (True, True)
    """
    marked = boxed(text)
    if marked is None and (marks := list(_MARKED.finditer(text))):
        marked = marks[-1]["answer"]
    where = (text if marked is None else marked).lower()
    found = set()
    for label in labels:
        for match in re.finditer(rf"\b{re.escape(label.lower())}\b", where):
            if not _NEGATION.search(where[: match.start()]):
                found.add(label)
    return found.pop() if len(found) == 1 else None


def grade_label(text: str, truth: str, labels: Sequence[str]) -> Grade:
    """Grade a classification; text that asserts none or several labels has no final answer."""
    if truth not in labels:
        return Grade(None, None, f"the label {truth!r} is none of {', '.join(labels)}")
    answer = find_label(text, labels)
    if answer is None:
        return Grade(None, False, "no single label is asserted")
    return Grade(answer, answer == truth, "equals the label" if answer == truth else "differs from the label")


def _first_sentence(text: str) -> str:
    """Up to the end of the sentence; a full stop inside a number does not end it."""
    return re.split(r"(?<=[^\s])[.!?](?=\s|$)", text, maxsplit=1)[0]


def _trim(text: str) -> str:
    text = text.strip().strip("*_`").strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text.rstrip(".!?,;:").strip().strip("*_`").strip()


def _same_mathematics(answer: str, truth: str) -> bool | None:
    from math_verify import parse, verify  # sympy behind it takes a second to load

    # math-verify's own time limits rest on signals, which only the main thread receives
    limit = 3 if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"${truth}$", parsing_timeout=limit)
    if not gold:
        return None
    return bool(verify(gold, parse(f"${answer}$", parsing_timeout=limit), timeout_seconds=limit))
