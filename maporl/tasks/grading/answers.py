r"""Grading: find the final answer of a text, bring it into one form, and compare it. Every rule is a doctest.

The grammar of a final answer is strict. The first of these forms that a text has counts, and of that form the *last* one:

1. ``\boxed{...}`` with balanced braces;
2. ``#### ...`` to the end of the line (GSM8K);
3. ``Answer: ...`` or ``the (final) answer is ...``, to the end of the sentence or to the next such mark;
4. the whole text, if it is only a number, or only an equation in numbers, of which the right-hand side counts.

What follows ``####`` or ``Answer:`` counts only if it is a number or short mathematics, so that headings and prose are
passed over. If it begins with a number but is neither, as in "5 or 6", then the text has no answer, whatever it said
before.

A text in no such form has no final answer. It is never right.

The work is bounded, so that no text takes long: only the last :data:`LONGEST_TEXT` characters of a text are read, and of
these the last :data:`MOST_CANDIDATES` marks. A label of more than :data:`LONGEST_LABEL` characters cannot be graded.
"""

import re
from collections import deque
from collections.abc import Iterable

from maporl.tasks.grading.mathematics import is_mathematics, same_mathematics
from maporl.tasks.grading.numbers import LONGEST_ANSWER, arithmetic, canonical, number, plain, trim
from maporl.tasks.grading.symbolic import Allowance
from maporl.types import Grade

LONGEST_TEXT = 100_000
"""Of a longer text, its last characters are read: a final answer stands at the end."""
LONGEST_LABEL = 10_000
"""The most characters of a label. The labels of the benchmarks have at most 210."""
MOST_CANDIDATES = 100
"""Of more marks, such as ``Answer:``, the last ones are read."""
_MARK = re.compile(r"(?:\bfinal\s+answer\b|\banswer\b)\**\s*(?:is\b|=|:)\**\s*:?\s*", re.IGNORECASE)
_HEADED = re.compile(r"####[ \t]*([^\n#]+)")
_BEGINS_WITH_NUMBER = re.compile(r"(?!\d+[.):]\s)[-+−–$€£]*\s*\.?\d")  # items of a numbered list do not count
_UNASSERTED = re.compile(r"\b(?:not|cannot|never|doubt|wrong|incorrect|if|whether)\b|n['’]t\b", re.IGNORECASE)

_LEFT_ARITHMETIC = re.compile(r"(?:[0-9\s.,$€£%+\-−*/×·÷()]|x(?=\s*[0-9(.])|\\times|\\cdot|\\div)+")
_OPERATOR_AFTER_NUMBER = re.compile(  # it looks at each run of digits and signs once, from the run's beginning
    r"(?<![0-9.,$€£%\s)])[.,$€£%\s)]*[0-9][0-9.,$€£%\s)]*(?:[-+*/x×·÷−]|\\times|\\cdot|\\div)"
)
_LEFT_VARIABLE = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\([a-z]\))?")
CLAUSES = re.compile(
    r"[.!;:,()\n–—]+|(?<=\?)|\s-+\s|(?<!anything )(?<!all )\bbut\b|(?=\brather than\b)|(?=\binstead of\b)"
)


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}`` with balanced braces, or None.

    >>> boxed(r"so \boxed{\frac{1}{2}} or rather \boxed{\sqrt{\frac{3}{4}}}")
    '\\sqrt{\\frac{3}{4}}'
    >>> boxed(r"cut off \boxed{12") is None
    True
    """
    best, content = -1, None
    opened: list[int] = []
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace.group() != "}":
            opened.append(brace.end() if len(brace.group()) > 1 else -1)
        elif opened and (start := opened.pop()) > best:
            best, content = start, text[start : brace.start()].strip()
    return content


def final_answer(text: str) -> str | None:
    r"""The final answer of ``text`` by the grammar above, as it is written, or None if the text has no final answer.

    >>> final_answer("2 + 3 = 5\n#### 1,234")
    '1,234'
    >>> final_answer("The answer is 12 km. Yes."), final_answer("The answer is 5. No wait, the final answer is 6.")
    ('12 km', '6')
    >>> final_answer("Answer: 3.5"), final_answer("Answer: x = 5"), final_answer(" 42. ")
    ('3.5', '5', '42')
    >>> final_answer("#### Step 1: add\n2+3=5\nAnswer: 5"), final_answer("Answer: 5\n\nI hope the answer is correct.")
    ('5', '5')
    >>> final_answer("2 + 3 = 5 apples"), final_answer("First 2 + 3 = 5, then I stop."), final_answer("1=2=3")
    ('5 apples', None, None)
    >>> final_answer("Answer: 4 = 5 = 6"), final_answer("Answer: 5\nOr the answer is 5 or 6."), final_answer("Answer: 5?")
    (None, None, None)
    >>> final_answer("I do not think the answer is 5."), final_answer("Answer: 9^{9^{9}}")
    (None, None)
    """
    text = text[-LONGEST_TEXT:]
    answer = boxed(text)
    if answer is not None:
        answer = _right_hand_side(trim(answer))
        return answer if 0 < len(answer) <= LONGEST_ANSWER else None
    answer = _last_candidate(heading[1] for heading in deque(_HEADED.finditer(text), MOST_CANDIDATES))
    if answer is None:
        answer = _last_candidate(_first_sentence(written) for before, written in marked(text) if _asserted(before))
    if answer is None:
        answer = _right_hand_side(trim(text), variable=False)
        return answer if number(answer) is not None else None
    return answer or None


def same_answer(answer: str, truth: str, allowance: Allowance | None = None) -> bool | None:
    r"""Whether two answers are equal, as exact numbers or else as mathematics (math-verify).

    None if ``truth`` is neither a number nor mathematics, or has more than :data:`LONGEST_LABEL` characters. The
    comparison of mathematics may take the CPU time that ``allowance`` has left; an answer that takes longer is wrong.

    >>> same_answer("0.5", r"\frac{1}{2}"), same_answer("2+3", "5"), same_answer(r"x^2+2x+1", r"(x+1)^2")
    (True, True, True)
    >>> same_answer("235", "5"), same_answer("5 because 4+2=6", "6"), same_answer("5 & 6", "6")
    (False, False, False)

    Raises:
        MathematicsError: the process that compares mathematics cannot work here.
    """
    if len(truth) > LONGEST_LABEL:
        return None
    if canonical(answer) == canonical(truth):
        return True
    if number(truth) is not None and (number(answer) is not None or arithmetic(plain(answer)) is not None):
        return False
    return same_mathematics(answer, truth, allowance)


def grade_mathematics(text: str, truth: str) -> Grade:
    r"""Grade a worked answer against the label ``truth``.

    >>> grade_mathematics(r"... so \boxed{1{,}234}", "1234").correct, grade_mathematics("2 + 3 = 5 apples", "235").correct
    (True, False)

    Raises:
        MathematicsError: the process that compares mathematics cannot work here.
    """
    if len(truth) > LONGEST_LABEL:
        return Grade(None, None, too_long(truth))
    answer = final_answer(text)
    if answer is None:
        return Grade(None, False, "no final answer in the asked form")
    verdict = same_answer(answer, truth)
    reason = {True: "equals the label", False: "differs from the label", None: "the label cannot be read"}[verdict]
    return Grade(canonical(answer), verdict, reason)


def too_long(truth: str) -> str:
    """Why a label of so many characters cannot be graded, for people."""
    return f"the label has {len(truth)} characters; at most {LONGEST_LABEL} are compared"


def marked(text: str) -> list[tuple[str, str]]:
    """For each of the last marks such as ``Answer:``: the clause before it, and its line after it up to the next mark.

    >>> marked("Well, the answer is 5. No, the answer: 6\\nfine")
    [(' the ', '5. No, the '), (' the ', '6')]
    """
    marks = deque(_MARK.finditer(text), MOST_CANDIDATES)
    found = []
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        before = text[max(0, mark.start() - 200) : mark.start()].rsplit("\n", 1)[-1]
        found.append((CLAUSES.split(before)[-1], text[mark.end() : end].split("\n", 1)[0]))
    return found


def _asserted(before: str) -> bool:
    return _UNASSERTED.search(before) is None


def _last_candidate(candidates: Iterable[str]) -> str | None:
    """The last candidate that can be read, or None. "" if a later one begins with a number but cannot be read."""
    for candidate in reversed(list(candidates)):
        answer = _right_hand_side(trim(candidate))
        if number(answer) is not None or ("=" not in answer and is_mathematics(answer)):
            return answer
        if _BEGINS_WITH_NUMBER.match(answer):
            return ""
    return None


def _right_hand_side(text: str, variable: bool = True) -> str:
    r"""The right-hand side of ``text`` if it is one equation with arithmetic, or a ``variable``, on its left; else ``text``.

    >>> [_right_hand_side(t) for t in ("x = 5", r"7 \times 3 = 21", "f(x)=x^2", "4 = 5", "1+1=2=2", "x+y=3")]
    ['5', '21', 'x^2', '4 = 5', '1+1=2=2', 'x+y=3']
    """
    left, _, right = text.partition("=")
    if not right.strip() or "=" in right or "\n" in text.strip() or len(text) > LONGEST_ANSWER:
        return text
    left = left.strip()
    arithmetic_left = _LEFT_ARITHMETIC.fullmatch(left) and _OPERATOR_AFTER_NUMBER.search(left)
    simple = arithmetic_left or (variable and _LEFT_VARIABLE.fullmatch(left))
    return trim(right) if simple else text


def _first_sentence(text: str) -> str:
    """``text`` up to the end of its first sentence, which a full stop inside a number does not end."""
    return re.split(r"(?<=[^\s.])[.!](?=[\s*_]|$)", text, maxsplit=1)[0]
