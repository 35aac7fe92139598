r"""Grading: find the final answer of a text, bring it into one form, and compare it. Every rule is a doctest.

What stands in a thought, such as ``<think>...</think>``, does not count. A thought that is cut off goes on to the end.

The grammar of a final answer is strict. The first of these forms that a text has counts, and of that form the *last*
one, unless a later one of another form tells another answer of its kind, which counts instead:

1. ``\boxed{...}`` or ``\fbox{...}`` with balanced braces, or ``\boxed5``; an empty box does not count, and neither does
   one whose value what stands beside it changes, denies or takes back; a text whose last box is cut off has no answer;
2. ``#### ...`` to the end of the line (GSM8K);
3. ``Answer: ...``, ``<answer>...</answer>`` or ``the (final) answer is ...``, to the end of the sentence or to the next
   such mark;
4. the whole text, if it is only a number or the letter of an option, or only an equation in numbers, of which the
   right-hand side counts.

What follows ``####`` or ``Answer:`` counts only if it is a number, short mathematics, an option such as ``B) Paris``,
or a sentence that tells one number or formula and neither changes nor denies it, so that headings and other prose are
passed over. Several forms of one answer, such as "1/2, i.e. 50%", count if they agree. If
it begins with a number and is something else, as in "5 or six", then the text has no answer, whatever it said before.
It has none either if it takes the answer back without giving another one.

A text in no such form has no final answer. It is never right.

Both the answer and the label are read by :func:`reading`, whole or not at all. A label that cannot be read so is
compared as it is written, but for typesetting.

The work is bounded, so that no text takes long: only the last :data:`LONGEST_TEXT` characters of a text are read, and
of these the last :data:`MOST_CANDIDATES` marks. A label of more than :data:`LONGEST_LABEL` characters cannot be graded.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache

from maporl.grading.expressions import Tree, based, read
from maporl.grading.moments import moment_of, moments, same_moment
from maporl.grading.numbers import (
    CURRENCIES,
    LONGEST_ANSWER,
    is_prose,
    number,
    plain,
    spelled_in_digits,
    surrounds,
    trim,
)
from maporl.grading.units import in_one_unit, split_unit, unit_of, unit_ratio
from maporl.grading.values import Budget, is_computable, real_value, same, same_in_order
from maporl.text import spoken
from maporl.types import Grade

LONGEST_TEXT = 100_000
"""Of a longer text, its last characters are read: a final answer stands at the end."""
LONGEST_LABEL = 10_000
"""The most characters of a label. The labels of the benchmarks have at most 210."""
MOST_CANDIDATES = 100
"""Of more marks, such as ``Answer:``, the last ones are read."""
LONGEST_MATHEMATICS = 400
"""The most characters of an answer without a box that is read as mathematics."""
_BOX = re.compile(
    r"\\(?:boxed|fbox|framebox|bbox(?:\s*\[[^\]\n]*\])?)(?![A-Za-z])\s*(?:(?P<brace>\{)|(?P<bare>-?[0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])"
    r"|-?\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}))|(?<!\\)\\[{}]|[{}]"
)
_EDGE = r"(?:[$\s*]|\\[\[\]()]|\\[,;: ]|\\quad(?![A-Za-z]))*"
_NAME_IS = r"(?:(?P<name>[A-Za-z](?:_(?:\w|\{\w+\}))?)\s*=\s*)?"
_JOINT = re.compile(
    rf"{_EDGE}(?:,|(?:,{_EDGE})?\b(?:and|or)\b|(?:,{_EDGE})?\\(?:text|mbox|quad\\text)\s*\{{\s*(?:and|or)\s*\}}){_EDGE}{_NAME_IS}{_EDGE}"
)
_NAMED_BEFORE = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_(?:\w|\{\w+\}))?)\s*=\s*$")
_COMMANDS = r"(?:pi|sqrt|[dtc]?frac|cdot|times|div|pm|mp|neq?|not|log|ln|sin|cos|tan|theta|binom)(?![A-Za-z])"
_BOUND_BEFORE = re.compile(  # what changes the meaning of a box that follows it
    rf"(?i)(?:[\w)}}\]]\s*[-+*/]|(?<![\w\s*])\s*[-+]|^[-+]|[$({{\[=:]\s*[-+]|[\^_≠±·×÷√/|]|(?<=\s)!=|\d|\\{_COMMANDS})\s*$"
    r"|(?:\b(?:not|never|neither|nor|cannot|isnt)|n['’]t)(?:\s+(?:be|is|the|equal|to|just|only|simply))*[\s$*:]*(?:\\[\[(])?\s*"
    r"(?:\\text\s*\{[^{}]*\}\s*)?$"
)
_INSIDE_OF = re.compile(
    r"(?:\\sqrt\s*(?:\[[^\[\]]*\])?|\\[dtc]?frac\s*(?:\{[^{}]*\})?|[\^_]|\\(?:overline|bar|log|ln|sin|cos|tan|exp|binom))\s*$"
)
_BOUND_AFTER = re.compile(  # what changes the meaning of a box that stands before it
    rf"(?i)[\s]*(?:\\[,;:! ]\s*)*(?:[-+/]\s*(?:[\d(]|\\|[A-Za-z](?![A-Za-z]))|\*\s*[\d(]|\^(?!\s*\{{?\s*(?:\\circ|°))|_[\d{{]|[≠±·×÷√π]"  # noqa: E501
    rf"|\\{_COMMANDS})|[\d(A-Za-z](?![A-Za-z(])|![\d!]"
    r"|[\s$]*(?:\\[,;:! \])]\s*)*(?:\\(?:text|mbox|mathrm)\s*\{)?\s*(?:hundred|thousand|million|billion|trillion|dozen)s?\b"  # noqa: E501
    r"|[\s$,.]*(?:is|was|are)\s+(?:not|wrong|incorrect|false)\b|[\s$]*(?:is|was)n['’]t\b"
)
_OR_AFTER = re.compile(
    r"(?:[\s$,]|\\[,;:! \])]|\\quad)*(?:\\(?:text|mbox)\s*\{\s*(?:or|and)\s*\}|\b(?:or|and)\b|\\(?:lor|vee)(?![A-Za-z]))\s*(?:\\[\[(])?[\s$]*"  # noqa: E501
    r"(?P<other>[-+]?(?:[A-Za-z]\s*=\s*)?(?:\d[\d.,/]*\d|\d|\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt\s*\{[^{}]*\}|\\pi)(?![A-Za-z]))"
)
_EMPTY_BOX = re.compile(r"\s*(?:\\[hv]?phantom\s*\{[^{}]*\}\s*|\\(?:quad|qquad|[,;:! ])\s*|~|\$)*")
_MARK = re.compile(
    r"(?im)(?:\banswer\b|\bans\b|\b(?:option|choice)(?=\s+is\b))"
    r"(?:\s*\([^()\n]{1,40}\)|,?\s(?:to|in|for|of|as|then|therefore|thus|hence|here)\b(?:(?!\b(?:answer|is)\b)[^.:=\n$]){0,60})?[\"'”]?\**"
    r"(?:['’]s\b|\s*(?:(?:is|equals|becomes)\b|(?:would|should|must|will|has\s+to)\s+be\b|(?:comes|works|turns)\s+(?:out\s+)?(?:to\s+be|to|as)\b|=|[:：→⇒]|->))"
    r"\**\s*[:：=]?\s*(?:(?:therefore|thus|hence|equal\s+to|simply)\b\s*)?"
    r"|^[^\w\n]*(?:(?:my|final|correct)\s)*answer[^\w\n]*\n[\s>]*|^\s*\|[^\w|\n]*(?:final\s)?answer[^|\n]*\|\s*|答案\**\s*(?:[:：]|是|为)\**\s*[:：]?\s*|<answer>\s*"
)
_AFTERTHOUGHT = re.compile(
    r"(?i)(?<=[^\s(])\s?\((?!mod\b|base\b|or\b|and\b|in\b)(?![^()]*(?:\b(?:not|wrong|incorrect|false|mistaken?|actually|rather|instead|should|no)\b|n['’]t))"
    r"(?:[a-z]{2,}|I|[$€£₹]?\d[\d.,]*)\s(?![-+*/=])[^()]*\)$"
)
_REASON = re.compile(
    r"(?s)(?:,\s*|\s)(?:because|since)\s+\S.*|,\s*as\s(?!I\b).*|(?:,|\s\(|\s[—–])\s*(?:and\s+)?(?:not|rather\sthan|instead\sof)\s+(?:[A-Z]|[$€£]?\d)[^,;()]*\)?$|,\s*(?:al)?though\s.*"
    r"|(?P<remark>(?:,|\s[—–-])?\s+for\s+(?:all|every|any|each|some|integers?|real|positive|\$?[A-Za-z]\s*(?:\\neq?\b|≠|[<>]|\\[gl]eq?\b)).*"
    r"|(?:,\s*|\s[—–-]\s+)(?:an?|the|who|which|where|with|assuming|exactly)\s.*)"
)
_FORMS = re.compile(  # between two forms of one answer, of which the second one may be rounded
    r"(?i)\s*(?:[,;]\s*)?(?:(?P<about>(?:\bwhich\s+is\s+|\bor\s+|\bi\.e\.,?\s+)?(?:≈|\\approx\b|\b(?:about|approximately|approx\b\.?|roughly)\s))"
    r"|(?P<same>(?:\bor,?\s+)?\bequivalently\b,?|\bi\.?\s?e\b\.?,?|(?<=[,;]\s)that\s+is\b,?|\bor\s+in\s+\w+\s+(?:notation|form)\b,?|\bwhich\s+(?:is|equals)\b)|\bor\b|=)\s*"
)
_IN_BRACKETS = re.compile(
    r"\s*\(((?:or|i\.?e|that is|equivalently|about|approximately)\b.*|[≈=].*|\\approx.*|"
    r"(?P<again>[$€£]?\d[\d.,/]*%?(?:\s[a-z]+)?))\)$"
)
_ENDS_WITH_UNIT = re.compile(r"(?:%|[a-z]\}?(?:\^?[23²³])?)\W*$")
_ASIDE = re.compile(r"\$[^$=]*\$|\\\([^=]*?\\\)|[$€£]?\d[\d.,%]*[a-z]{0,2}|\b(?:[b-zB-HJ-Z]|positive|two)\b|^[\s,—–-]+")
_EMPHASIS = re.compile(
    r"(?<![\w*])(\*{1,3}|__)(?=[^\s*])(.+?)(?<=[^\s*])\1(?![\w*])|(?<=[\w$%)])\*\*(?=[\s.,;:!]|$)|</?(?:b|i|u|em|strong)>"
)
_OPEN = re.compile(r",|\b(?:one|some|any|most) of\b|\b(?:is|are|was)\b.*\band\b|\b(?:minus|plus|without|say|thought)\b")
_PREDICATE = re.compile(
    r"(?is)(?:(?:so|thus|hence|therefore|together|finally),?\s)?(?P<before>[^;:]*(?:\b(?:is|are|was|were|equals|(?:will|would|must)\sbe|falls|facing)\b|['’]s\b))(?:\s+(?:at(?!\s(?:least|most))|that|equal\sto|given\sby))?:?\s+(?P<told>\S.*)"
)
_FORMULA = re.compile(r"(\$[^$]*[^$\s\\]\$(?!\d)|\\\(.+?\\\))")
_NUMBER = re.compile(rf"((?:[{CURRENCIES}]\s?)?(?<![^\s({CURRENCIES}])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)")
_TAKEN_BACK = re.compile(
    r"(?i)(?:^|[.!?…\n(])[\s*]*(?:(?:hmm+|oh|well|but|ah)\W+)*(?:no\b(?=\s*[,.;:!—–-]|\s+wait)|wait\b|oops\b|sorry\b|scratch\s+that|correction\b|edit\s*:|rather\b|hold\s+on"
    r"|on\s+second\s+thought|let\s+me\s+correct|strike\s+that)|\bcan(?:no|['’])t\s+be\s+(?:right|correct)"
    r"|\b(?:that|this|it|which|answer|result|value|i)(?:['’]s|\s+(?:is|was|seems|am))(?:n['’]t\s+|\s+not\s+|\s+)(?:(?<=t\s)(?:right|correct|true)|wrong|incorrect"
    r"|false|mistaken|an?\s+(?:mistake|error))\b|\bi\s+(?:\w+\s+)?(?:made|had)\s+an?\s+(?:\w+\s+)?(?:mistake|error)|\bmy\s+mistake"
    r"|\bshould\s+(?:rather\s+|actually\s+)?(?:be|have\s+been)\W{1,4}\d|\bactually\b[^.\n]*\d"
)
_SUPPOSED = re.compile(r"(?i)\b(?:if|hope|whether|unless|once|otherwise|without)\b(?:[^.!?\n]|\.(?=\d))*$")
_PLAINLY = re.compile(
    r"(?i)^(?!.*\b(?:check|verif|confirm|test)).*(?:^|\b(?:the|my|our|final|correct|so|thus|hence|therefore)|[^\x00-\x7f])\W*$"
)
_CORRECTED = re.compile(
    rf"(?i)(?:\b(?:be|been|is|are|equals?|gives?|get|read|correction)\b|['’]s\b|=)[\s:*$]*([-−]?[{CURRENCIES}]?\s?\d[\d,]*(?:\.\d+)?(?:/\d+)?)"
)
_HEADED = re.compile(r"####[ \t]*([^\n#]+)")
_BEGINS_WITH_NUMBER = re.compile(r"(?!\d+[.):]\s)[-+−–$€£]*\s*\.?\d")  # items of a numbered list do not count
_UNASSERTED = re.compile(
    r"(?i)\b(?:not|none|neither|cannot|never|doubt|wrong|incorrect|false|if|whether|half|twice|double|reciprocal|opposite)\b|n['’]t\b"
)

_LEFT_ARITHMETIC = re.compile(r"(?:[0-9\s.,$€£%+\-−*/×·÷()]|x(?=\s*[0-9(.])|\\times|\\cdot|\\div)+")
_OPERATOR_AFTER_NUMBER = re.compile(  # it looks at each run of digits and signs once, from the run's beginning
    r"(?<![0-9.,$€£%\s)])[.,$€£%\s)]*[0-9][0-9.,$€£%\s)]*(?:[-+*/x×·÷−]|\\times|\\cdot|\\div)"
)
_LEFT_VARIABLE = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\([a-z]\))?|(?:\\text\s*\{\s*)?[A-Za-z]{3}[A-Za-z ]{0,40}\}?"
)
CLAUSES = re.compile(
    r"[.!;:,()\n–—]+|(?<=\?)|\s-+\s|(?<!anything )(?<!all )\bbut\b|(?=\brather than\b)|(?=\binstead of\b)"
)


def boxed(text: str, alone: bool = True) -> str | None:
    r"""The content of the last box, or None. Boxes that are joined by "and" or a comma are one list.

    >>> boxed(r"so \boxed{\frac{1}{2}} or rather \boxed{\sqrt{\frac{3}{4}}}")
    '\\sqrt{\\frac{3}{4}}'
    >>> boxed("none") is None, boxed(r"\boxed {5}"), boxed(r"\boxed5"), boxed(r"\fbox{5}"), boxed(r"\boxed{5} \boxed{}")
    (True, '5', '5', '5', '5')
    >>> boxed(r"$\boxed{1}$ and $\boxed{9}$"), boxed(r"\boxed{4}. No, \boxed{5}")
    ('1, 9', '5')

    Unless ``alone`` is false, a last box that is cut off is empty, and one whose value what stands beside it changes or
    denies, or what follows takes back, is not read.

    >>> boxed(r"cut off \boxed{12"), boxed(r"\boxed{7}, or \boxed{1"), boxed(r"\boxed{7}. No, wait.")
    ('', '', None)

    >>> [boxed(t) for t in (r"-\boxed{5}", r"\boxed{5}\pi", r"$\boxed{5}$ or $6$", r"It is not \boxed{5}", r"\sqrt{\boxed{5}}")]
    [None, None, None, None, None]
    >>> boxed(r"$x = \boxed{5}\text{ cm}$."), boxed(r"- \boxed{5}"), boxed(r"$\boxed{0.5}$ or $\frac12$")
    ('5', '5', '0.5')
    """  # noqa: E501
    boxes: list[tuple[int, int, int, int]] = []  # where each begins and ends, and where its content does
    around: dict[int, int] = {}  # where the brace is that was open when a box began
    opened: list[tuple[int, int, int]] = []
    for match in _BOX.finditer(text):
        if match["bare"]:
            boxes.append((match.start(), match.end(), *match.span("bare")))
            around[match.start()] = opened[-1][2] if opened else 0
        elif match[0] in ("\\{", "\\}"):
            continue  # a brace that is shown
        elif match.group() != "}":
            if match["brace"]:
                around[match.start()] = opened[-1][2] if opened else 0
            opened.append((match.start(), match.end(), match.start()) if match["brace"] else (-1, -1, match.start()))
        elif opened:
            start, content, _ = opened.pop()
            if start >= 0 and not _EMPTY_BOX.fullmatch(text, content, match.start()):
                boxes.append((start, match.end(), content, match.start()))
    if alone and opened and max(start for start, _, _ in opened) > max(boxes, default=(-1,))[0]:
        return ""
    if not boxes:
        return None
    last = max(boxes)
    contents, start = [text[last[2] : last[3]].strip()], last[0]
    for box in sorted((box for box in boxes if box[1] <= start), reverse=True)[:MOST_CANDIDATES]:
        joint = _JOINT.fullmatch(text, box[1], start) if start - box[1] <= 60 else None
        named = _NAMED_BEFORE.search(text, max(0, box[0] - 20), box[0]) if joint and joint["name"] else None
        if joint is None or (joint["name"] and not (alone and named and named[1] == joint["name"])):
            break
        contents, start = [text[box[2] : box[3]].strip(), *contents], box[0]
    if alone and not _stands_alone(text, start, last[1], around[start], contents[-1]):
        return None
    alike = all(content == contents[-1] or same_answer(content, contents[-1]) for content in contents)
    told = contents[-1] if alike else ", ".join(contents)
    return _at_last(text, last[1], told) if alone else told


def _at_last(text: str, end: int, told: str) -> str:
    r"""What ``text`` marks as its answer after ``end``, where ``told`` ends, if it is another one of its kind; else
    ``told``. It is "" if this names several.

    >>> [_at_last(f"7{rest}", 1, "7") for rest in (" weeks. The answer is 49 days", ". The answer is 7.0", "\n#### 8", ". If not, the answer is 8")]
    ['49 days', '7', '8', '7']
    >>> [_at_last(f"Bern. The answer is {rest}", 4, "Bern") for rest in ("Rome.", "**Bern**.", "clear.")]
    ['Rome', 'Bern', 'Bern']
    """  # noqa: E501
    after = max(0, end - 80)  # the clause before a mark is a part of it
    lines = [(at, line) for before, line, at in marked(text[after:]) if _PLAINLY.search(before) and _asserted(before)]
    heads = deque(_HEADED.finditer(text[after:]), MOST_CANDIDATES)
    lines += [(head.start(1), head[1]) for head in heads if number(head[1]) is not None]
    lines = [(start + after, line) for start, line in lines if start + after > end and "?" not in line]
    kind = _kind(told) if lines else None
    for start, line in sorted(lines, reverse=True):
        line = trim(_REASON.split(_EMPHASIS.sub(r"\2", trim(_first_sentence(line))))[0])
        if (said := _read_candidate(line)) == "" and (first := _NUMBER.match(plain(line))) and not _HEDGED.search(line):
            said = first[0]  # as in "5 of the 8 slices"
        said = line if said is None else said
        if kind and (not said or _kind(said) == kind) and not _SUPPOSED.search(text[max(end, start - 200) : start]):
            tree = reading(right_hand_side(told))
            names = said and tree is None and (normal(said) in normal(told) or normal(told) in normal(said))
            rounded = said and tree and "." not in told and _rounds_to(tree[0], f"≈{said}")
            return told if names or rounded or same_answer(said, told) else said
    return told


def _kind(text: str) -> object:
    """How ``text`` is read: as an option, a moment, mathematics or a name. Only answers of one kind are compared."""
    text = trim(plain(right_hand_side(text)))
    return next((read for read in (option, moment_of, reading, _PROPER.fullmatch) if read(text)), None)


def _stands_alone(text: str, start: int, end: int, brace: int, content: str) -> bool:
    """Whether nothing beside the boxes from ``start`` to ``end`` changes or denies what the last one holds."""
    before, after = text[max(0, start - 80) : start], text[end : end + 80]
    line = before.rsplit("\n", 1)[-1]
    if re.fullmatch(r"\s*[-+*]\s+|\s*\d+[.)]\s*", line):
        line = ""  # an item of a list
    inside = text[brace : brace + 1] == "{" and _INSIDE_OF.search(text[max(0, brace - 80) : brace])
    if inside or _BOUND_BEFORE.search(line):
        return False
    if _BOUND_AFTER.match(after) or (after.strip() and _corrected(text, end, content) is not None):
        return False
    other = _OR_AFTER.match(after)
    return other is None or bool(same_answer(right_hand_side(other["other"]), content))


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
    (None, '5 or 6', None)
    >>> final_answer("I do not think the answer is 5."), final_answer("Answer: 9^{9^{9}}")
    (None, None)
    """  # noqa: E501
    written = written_answer(text)
    if written is None:
        return None
    answer = right_hand_side(written)
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


def written_answer(text: str) -> str | None:
    r"""As :func:`final_answer`, with what stands before an equals sign: "x = 5" does not answer a label "y = 5"."""
    text = spoken(text)[-LONGEST_TEXT:]
    answer = boxed(text)
    if answer is not None:
        answer = trim(_HEAD_IN_BOX.sub("", trim(answer)))
        return answer if 0 < len(answer) <= LONGEST_ANSWER else None
    answer = _last_candidate(text, ((head[1], head.end(1)) for head in deque(_HEADED.finditer(text), MOST_CANDIDATES)))
    if answer is None:
        answers = [(_first_sentence(line), start) for before, line, start in marked(text) if _asserted(before)]
        answer = _last_candidate(text, ((line, start + len(line)) for line, start in answers))
    if answer is None:
        answer = trim(text)
        alone = re.fullmatch(r"\([A-J]\)|[A-J]", answer) or number(right_hand_side(answer, variable=False)) is not None
        return answer if alone else None
    return answer or None


@lru_cache(1024)  # a label is read again for each answer
def reading(text: str) -> tuple[Tree, Tree | None] | None:
    r"""What ``text`` means if it is a number or mathematics that is read whole and is small enough to be computed, or
    None.

    The second tree is the other meaning of a text such as "1,234", which may be a list. A unit at the end is left out.

    >>> reading("5 apples"), reading(r"\sqrt2\text{ cm}") == reading(r"\sqrt{2}"), reading("apples"), reading("9^{9^9}")
    ((('number', Fraction(5, 1)), None), True, None, None)
    """
    if len(text) > 2 * LONGEST_ANSWER:
        return None
    plainly = plain(text)
    value = number(text) if based(plainly) is None and not _ANGLE.search(plainly) else None
    if value is not None:
        other = read(text, thousands=False) if "," in text else None
        return ("number", value), other if other and other[0] != "number" else None
    body, unit = split_unit(text)
    tree = (read(body) if unit else None) or read(text)
    if tree is None:
        whole = in_one_unit(plainly)
        return reading(whole) if whole else None
    if not is_computable(tree):
        return None
    other = read(text, thousands=False) if "," in text else None
    return tree, other if other != tree else None


def label_of(given: str) -> tuple[str, str | None]:
    r"""The label in a data set's answer, and the worked solution from which it was taken, or None.

    A data set may write its answer after ``####``, or have worked solutions only: then the last box is the label, or
    what a solution of several sentences marks as its answer.

    >>> label_of("2+3=5\n#### 5"), label_of("First, $2+3=\\boxed{5}$."), label_of("neither"), label_of(r"\boxed{5}")
    (('5', '2+3=5\n#### 5'), ('5', 'First, $2+3=\\boxed{5}$.'), ('neither', None), ('5', None))
    >>> label_of("Add them. The answer is 5.")
    ('5', 'Add them. The answer is 5.')

    Raises:
        ValueError: ``given`` is a worked solution without a box and without a marked answer.
    """
    if "####" in given:
        return without_thousands(given.rsplit("####", 1)[-1].strip()), given
    # an author's box is the answer to the question, as in \boxed{19}x^3 for a coefficient
    box = boxed(given, alone=False)
    if box is not None:
        whole = re.fullmatch(r"[\s$]*\\(?:boxed|fbox)\s*\{?(.*?)\}?[\s$.]*", given, re.DOTALL)
        return box, None if whole and whole[1].strip() == box else given
    given = given.strip()
    words, marks = len(_WORD.findall(given)), marked(given)
    sentences = len(given) > 200 or _SENTENCE.search(given) or (given.endswith(".") and _EQUATION.search(given))
    lines = "\n" in given and (marks or "\\begin" not in given)
    prose = (words >= 4 and sentences) or (words >= 2 and lines)
    if not prose or reading(given) is not None or option(given) is not None:
        return without_thousands(given), None
    answer = final_answer(given)
    if answer is None:
        raise ValueError("a worked solution as its answer, and neither a \\boxed{} nor an 'Answer:' in it")
    return answer, given


def without_thousands(label: str) -> str:
    """``label`` without the commas between thousands if it is one number, with a unit or without.

    >>> without_thousands("$1,234.50"), without_thousands("1,234 km"), without_thousands("3,4"), without_thousands("(1,234)")
    ('$1234.50', '1234 km', '3,4', '(1,234)')
    """  # noqa: E501
    match = _THOUSANDS.fullmatch(label) if len(label) <= 100 else None
    return label if match is None else match[1] + match[2].replace(",", "") + match[3]


def same_answer(answer: str, truth: str, budget: Budget | None = None) -> bool | None:
    r"""Whether two answers are the same, exactly: as numbers, as mathematics, or as they are written.

    None if ``truth`` is neither a number nor mathematics and the two are not written alike, or if it has more than
    :data:`LONGEST_LABEL` characters. A label that is a decimal of four digits or more stands for an irrational value
    too, if this rounds to it. Two known units that differ make two answers differ.

    >>> same_answer("0.5", r"\frac{1}{2}"), same_answer("2+3", "5"), same_answer(r"x^2+2x+1", r"(x+1)^2")
    (True, True, True)
    >>> same_answer("235", "5"), same_answer("5 because 4+2=6", "6"), same_answer("5 & 6", "6")
    (False, False, False)
    >>> same_answer("25%", "1/4"), same_answer("25%", "25"), same_answer("25%", "4")
    (True, True, False)
    >>> same_answer("80 cents", "80 dollars"), same_answer("80", "80 dollars"), same_answer("1, 234", "1,234")
    (False, True, True)
    >>> same_answer(r"\pi", "3.1416"), same_answer("3.1416", r"\pi"), same_answer("3.14", "3.1416")
    (True, False, False)
    """
    if len(truth) > LONGEST_LABEL:
        return None
    if len(answer) > 2 * LONGEST_ANSWER:
        return False if reading(truth) is not None else None
    if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(truth):  # most answers are, and this takes a tenth of the time
        return int(answer) == int(truth)
    if (choice := _same_option(answer, truth)) is not None:
        return choice
    moment, told = moment_of(truth), moment_of(answer) if moment_of(truth) else None
    if moment and told and ((same_time := same_moment(told, moment)) or moment[3:4] in ((), (None,))):
        return same_time  # of dates, which would be differences as numbers
    right = reading(truth) or (reading(right_hand_side(truth)) if "=" in truth else None)
    if right is None:
        return _written_alike(answer, truth) or (None if option(truth) is None else False)
    said = reading(answer) or reading(right_hand_side(answer))
    if said is None:
        sentence = in_a_sentence(answer)
        return _written_alike(answer, truth) or (sentence is not None and bool(same_answer(sentence, truth, budget)))
    ratio = unit_ratio(answer, truth)
    if ratio is None:
        return False
    budget = budget or Budget()
    several = said[0][1:] if said[0][0] == "list" != right[0][0] and _OR.search(answer) else ()
    if several and all(same(part, right[0], budget) for part in several):
        return True  # 7/2 or 3.5
    if ratio != 1:
        return same(("mul", (said[0], ratio), ()), right[0], budget)
    if (share := _share(said[0], answer, right[0], truth, budget)) is not None:
        return share
    if same(said[0], right[0], budget):
        return True
    if (said[1] or right[1]) and same_in_order(said[1] or said[0], right[1] or right[0], budget):
        return True  # 1, 234 and 1,234
    if right[0][0] == "number" and right[0][1].denominator != 1 and _DECIMAL_COMMA.search(answer):
        return number(_DECIMAL_COMMA.sub(".", answer)) == right[0][1]
    return _rounds_to(said[0], truth)


def _share(said: Tree, answer: str, right: Tree, truth: str, budget: Budget) -> bool | None:
    """Whether one of two answers is in percent and the other is the same share as a number: 25% and 1/4.

    None where both may also be in percent, as 25% and 25; but 0.15% is not 0.15.
    """
    percent = [text.rstrip(" .$}*").endswith(("%", "percent", "per cent")) for text in (answer, truth)]
    if percent[0] == percent[1]:
        return None
    hundred = ("number", Fraction(100))
    if percent[1]:
        return same(said, ("div", right, hundred), budget) or None
    value = real_value(right)
    return same(("div", said, hundred), right, budget) or (False if value and abs(value[0]) < 1 else None)


def _rounds_to(said: Tree, truth: str) -> bool:
    """Whether an irrational value rounds to the decimal ``truth``; or any value to one that is called approximate."""
    text = plain(truth)
    about = re.match(r"\\approx|≈|~|about |approximately ", text)
    decimal = re.match(r"[^0-9.]*([0-9][0-9,]*\.([0-9]+))", text)
    label = number(truth)
    if decimal is None or label is None or not (about or len(decimal[1].replace(".", "").strip("0")) >= 4):
        return False
    value = real_value(said)
    if value is None or (value[1] and not about):
        return False
    return abs(value[0] - label) <= Fraction(1, 2 * 10 ** len(decimal[2]))


_OR = re.compile(r"\bor\b")
_DECIMAL_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{1,2}(?![0-9]))")  # as in 3,5 km for 3.5 km
_WHOLE = re.compile(r"-?[0-9]{1,200}")
_ANGLE = re.compile(r"°(?![CF])")
_SENTENCE = re.compile(r"(?:[^\W\d_]{2}|[0-9)}\]$])\$?[.!?]\s+(?=[A-Z$\\])|\n")
_HEAD_IN_BOX = re.compile(r"(?:\\(?:text|mbox)\s*\{\s*)?(?:final )?answer\s?[:：]\s?\}?(?=[^{}]*$)", re.IGNORECASE)
_LETTER = re.compile(r"(?:(?:option|choice)\s+)?(?:\([A-J]\)|[A-J])[).]?", re.IGNORECASE)
_EQUATION = re.compile(r"\d\s*=\s*[$€£]?\s*-?\d")
_THOUSANDS = re.compile(r"([-+]?\s*[$€£]?\s*[-+]?)([0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?(?![0-9,])[^0-9,]*)")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_OPTION = re.compile(
    r"(?is)\s*(?:(?:it is|option|choice|answer)\s+)*(?:\(\s*([A-J])\s*\)|\[\s*([A-J])\s*\]|([A-J])\s*(?:[).:：→]"
    r"|\\(?:right|long)?(?:arrow|to|rightarrow)(?![A-Za-z])|$|—\s|[-–]\s(?=[A-Za-z]{3})))\s*(.*)"
)
_OTHER_OPTION = re.compile(
    r"\([A-J]\)|(?<![A-Za-z])[A-H][).](?:\s|$)|\b(?:or|but|not|rather)\s+\(?[A-H]\b(?!['’])|^(?:and|,)\s*\(?[A-H]\b"
)
_LETTERS = re.compile(
    r"(?<![\w'’])(?:[B-HJ]|I(?!\s[a-z])|A(?=[,;)]|\s(?:is|was|and|n?or|fits|too)\b)|(?<=ption )A)(?![\w'’])"
)
_OTHERS = re.compile(  # a sentence about options
    r"(?i)(?:^|(?<=[.;!]\s))(?:(?:none\sof|neither|both|because|since|as)\s)?(?:the\s)?(?:(?:other|remaining)\s)?(?:(?:option|choice|answer)s?\s)?\(?[A-J]\b(?!['’])(?:[^.;!](?!\b(?:so|hence|it\sis)\b))*[.;!]?"
)
_DENYING = re.compile(rf"{_UNASSERTED.pattern}|^(?:because|since|as)\b")
_AFFIRMED = re.compile(  # what may make another answer right
    r"(?i)(?<!\bnot\s)(?<!n['’]t\s)\b(?:right|correct|true|yes|best|better|closer|fits?|but|however|rather|instead|actually|wait|answer|unless|except|maybe|perhaps|sorry|otherwise|doubt|if)\b|(?:\bnot|n['’]t)\s+(?:\w+\s+)?(?:wrong|incorrect|false)\b|\?"
)
_HEDGED = re.compile(
    r"(?i)^\s*[-+*/^=<>?!&|;,]|\?|\b(?:not|no|never|none|neither|nor|cannot|wrong|incorrect|false|untrue|or|but|instead|rather|actually|"
    r"wait|maybe|perhaps|possibly|unsure|unlikely|doubt(?:ful)?|guess|correction|sorry|except|unless|either)\b|n['’]t\b"
    r"|(?<![A-Za-z])(?-i:[B-HJ])(?![A-Za-z'’])|\b(?:option|choice|answer|is|also|and|to)\s+\(?(?-i:[A-J])\b"
)
_OTHERS_DENIED = re.compile(  # and what options often say of themselves
    r"(?i)\b(?:none|neither|both) of (?:these|them|the above)\b|\bno (?:real )?solutions?\b|\b(?:does|do) not exist\b"
    r"|\bcannot be determined\b|\bnot enough information\b|\b(?:all |every |none of )?(?:the )?other(?:s| options?| choices?| answers?)?\s+(?:is|are)(?:n['’]t| not)?\s*"  # noqa: E501
    r"(?:all )?(?:wrong|incorrect|false|correct|right)\b"
)


def option(text: str) -> tuple[str, str] | None:
    r"""The letter and the text of an option such as ``B) Paris``, or None.

    >>> option("(B) Paris"), option("b. Paris"), option("B"), option(r"\text{(E)},"), option("B) Paris or C) Rome"), option("Bern")
    (('B', 'Paris'), ('B', 'Paris'), ('B', ''), ('E', ''), None, None)
    """  # noqa: E501
    if len(text) > LONGEST_ANSWER:
        return None
    match = _OPTION.fullmatch(plain(text).strip("* "))
    if (
        match is None
        or _OTHER_OPTION.search(told := _without_others(match[4], match[1] or match[2] or match[3]))
        or (match[4][:1] == "-" and match.string[match.start(4) - 1] != " ")
    ):
        return None  # neither "B) or C)" nor the difference (B)-1 is an option
    return (match[1] or match[2] or match[3]).upper(), trim(told)


def _without_others(text: str, letter: str) -> str:
    """What follows an option's letter without the sentences that only say that other options are wrong.

    >>> [_without_others(text, "A") for text in ("B and C are false.", "B fits.", "A is false.", "B is not wrong.")]
    ['', 'B fits.', 'A is false.', 'B is not wrong.']
    """

    def kept(told: re.Match[str]) -> str:
        others = letter.upper() not in _LETTERS.findall(told[0]) and _DENYING.search(told[0])
        return "" if others and not _AFFIRMED.search(told[0]) else told[0]

    return _OTHERS.sub(kept, text).strip()


def _same_option(answer: str, truth: str) -> bool | None:
    """Whether two options have the same letter, and the same text if both have one; None if one of them has none."""
    right, said = option(truth), option(answer)
    if right is None:
        return None
    if said is None:
        return True if right[1] and _written_alike(answer, right[1]) else None
    if said[0] != right[0] or (not right[1] and is_hedged(said[1])):
        return False
    return not (said[1] and right[1]) or _written_alike(said[1], right[1]) or bool(same_answer(said[1], right[1]))


def is_hedged(text: str) -> bool:
    """Whether what follows an option's letter may deny it or name another one. A label's own text is compared instead.

    >>> [is_hedged(text) for text in ("is incorrect", "No, D", "not this one", "5; B: 6", "or 17", "+1", "?", "That is wrong")]
    [True, True, True, True, True, True, True, True]
    >>> [is_hedged(text) for text in ("", "Paris", "12.0", "The others are wrong", "-5")]
    [False, False, False, False, False]
    >>> is_hedged("none of these"), is_hedged("It does not exist"), is_hedged("none of these; no, D")
    (False, False, True)
    """  # noqa: E501
    if re.fullmatch(r"-\s*[\d.\\].*", text, re.DOTALL):
        text = text[1:]
    rivals = _LETTERS.search(text) and _AFFIRMED.search(text)
    return bool(rivals) or _HEDGED.search(_OTHERS_DENIED.sub("", text)) is not None


def _written_alike(answer: str, truth: str) -> bool:
    return normal(answer) == normal(truth) != "" or same_name(answer, truth)


def same_name(answer: str, truth: str) -> bool:
    """Whether two names have the same words, of which one may be short for the other, as in "Franklin D. Roosevelt".

    >>> [same_name(name, "Franklin D. Roosevelt") for name in ("President Franklin Delano Roosevelt", "Franklin E. Roosevelt")]
    [True, False]
    >>> same_name("Mt. Everest", "Mount Everest"), same_name("São Paulo", "Sao Paulo"), same_name("Jean Paul Sartre", "jean-paul Sartre")
    (True, True, True)
    """  # noqa: E501
    answer, truth = unfold(answer[:LONGEST_ANSWER]), unfold(truth[:LONGEST_ANSWER])
    if _SIGN.search(answer + truth) or re.search("[0-9]", truth):
        return False
    mine, theirs = map(_NAME.findall, (answer if _TITLE.match(truth) else _TITLE.sub("", answer), truth))
    return len(mine) == len(theirs) and any(len(word) > 2 for word in theirs) and all(map(_is_short_for, mine, theirs))


def _is_short_for(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return short.rstrip(".") == long.rstrip(".") or (
        short.endswith(".") and bool(re.match(".*".join(short[:-1]), long))
    )


def unfold(text: str) -> str:
    """``text`` in small letters without accents."""
    return re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", plain(text).casefold()))


_NAME = re.compile(r"[^\W_]+\.?")
_TITLE = re.compile(
    r"(?:the\s+)?(?:(?:president|king|queen|prince|princess|sir|dame|lord|lady|dr\.?|doctor|mrs?\.?|ms\.?|prof(?:essor)?\.?|general|captain|pope"
    r"|emperor|(?:city|state|country|town|island|river|planet|element|novel|film|band|author|kingdom|republic)(?:\s+of)?)\s+)+"
)


def normal(text: str) -> str:
    r"""``text`` as words or as signs of mathematics, without what only sets the type. Words lose their case.

    >>> normal(r"\text{All real  Numbers}."), normal("x_{1} + y"), normal("A,  B"), normal("MR = SRMC"), normal("(ACF)")
    ('all real numbers', 'x_1+y', 'a,b', 'MR=SRMC', 'acf')
    """
    text = trim(plain(text))
    if re.search(r"[-+=^_\\<>|*/]", text):
        text = re.sub(r"\{\s*(\w)\s*\}", r"\1", text)
        return re.sub(r"(?<!\w)\s+|\s+(?!\w)|(?<=[0-9])\s+|\s+(?=[0-9])", "", text)
    text = re.sub(r"\s*([,;:])\s*", r"\1", " ".join(text.split())).casefold()
    return text[1:-1].strip() if re.fullmatch(r"\([^()]*\)", text) and not text[1:2].isdigit() else text


_ARITHMETIC = re.compile(r"[0-9 +\-*/()]{1,100}")


def canonical(answer: str) -> str:
    r"""One spelling for all equal answers, so that votes and agreement can compare texts.

    A number, or arithmetic in whole numbers, becomes its value; any other text loses its case and typesetting.

    >>> canonical("1,234.0 dollars"), canonical(r"\frac{2}{4}"), canonical(" Paris. "), canonical(r"\text{Paris}")
    ('1234', '1/2', 'paris', 'paris')
    >>> canonical("5"), canonical("5€"), canonical("2+3"), canonical("7/(2*4)"), canonical("1/0+1")
    ('5', '5', '5', '7/8', '1/0+1')
    """
    if (value := number(answer)) is not None:
        return str(value)
    plainly = plain(answer)
    tree = reading(answer) if _ARITHMETIC.fullmatch(plainly) else None
    computed = tree and real_value(tree[0])
    return str(computed[0]) if computed else re.sub(r"\s+", " ", plainly).lower()


def is_mathematics(text: str) -> bool:
    r"""Whether ``text`` is short mathematics, plain or in LaTeX, that is read whole and is small enough to compute.

    >>> [is_mathematics(t) for t in ("x^2+2x+1", r"\frac{\sqrt{3}}{2}", "2^{10}", "(1, 2]", r"2\pi", "1 and 2")]
    [True, True, True, True, True, True]
    >>> [is_mathematics(t) for t in ("no", "5 6", "5$ $6", "correct", "5+", "1=2=3", "9^{9^9}", "2^{99999}", "(9!)!")]
    [False, False, False, False, False, False, False, False, False]
    """
    return len(text) <= LONGEST_MATHEMATICS and not re.search(r"=[^=]*=", text) and reading(text) is not None


def grade_mathematics(text: str, truth: str) -> Grade:
    r"""Grade a worked answer against the label ``truth``.

    >>> grade_mathematics(r"... so \boxed{1{,}234}", "1234").correct, grade_mathematics("2 + 3 = 5 apples", "235").correct
    (True, False)
    """  # noqa: E501
    if len(truth) > LONGEST_LABEL:
        return Grade(None, None, too_long(truth))
    answer = written_answer(text)
    verdict = same_answer(answer or "", truth)
    if answer is None and verdict is False:
        return Grade(None, False, "no final answer in the asked form")
    reason = {True: "equals the label", False: "differs from the label", None: "the label cannot be read"}[verdict]
    return Grade(None if answer is None else canonical(right_hand_side(answer)), verdict, reason)


def too_long(truth: str) -> str:
    """Why a label of so many characters cannot be graded, for people."""
    return f"the label has {len(truth)} characters; at most {LONGEST_LABEL} are compared"


def marked(text: str) -> list[tuple[str, str, int]]:
    """For each of the last marks such as ``Answer:``: the clause before it, its line after it up to the next mark, and
    where this begins. Several lines with bullets or numbers are one list. A formula may stand on lines of its own.

    >>> marked("Well, the answer is 5. No, the answer: 6\\nfine"), marked("Answer:\\n- 5\\n- 6")
    ([(' the ', '5. No, the', 20), (' the ', '6', 39)], [('', '5, 6', 8)])
    """
    marks = deque(_MARK.finditer(text), MOST_CANDIDATES)
    pairs = []
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        before = text[max(0, mark.start() - 200) : mark.start()].rsplit("\n", 1)[-1]
        line = text[mark.end() : end].split("</answer>", 1)[0].rstrip()
        if items := _ITEMS.match(line):
            line = ", ".join(_ITEM.sub("", item).strip() for item in items[0].splitlines())
        elif shown := _DISPLAYED.match(line):
            line = " ".join(shown.groups()).replace("\n", " ").strip()
        elif mark[0][:1] == "<" and all(map(is_mathematics, line.split("\n"))):
            line = ", ".join(line.split("\n"))
        line = line.split("\n", 1)[0]
        line = line.split("|", 1)[0] if "|" in mark[0] else line
        if quoted := _QUOTED.match(line):
            ends = mark[0].rstrip(": ").endswith(("'", '"')) or _EXPLAINED.fullmatch(
                line, quoted.end()
            )  # a key of JSON
            line = quoted[2] if ends else quoted[2] + line[quoted.end() :]
        pairs.append((CLAUSES.split(before)[-1], line, mark.end()))
    return pairs


_QUOTED = re.compile(r"""(["'“])(.*?)(?:(?:\1|”)(?!\w)|$)""")
_EXPLAINED = re.compile(
    rf"""(?i:[\s.]*|(?:[:;]|\s[—–-]|,?\s(?:because|since|as|by))\s(?:(?!["“']|{_AFFIRMED.pattern[4:]}).)*)"""
)
_ITEM = re.compile(r"^(?:[-*•]|\d+[.)])[ \t]+")
_ITEMS = re.compile(r"(?:(?:[-*•]|\d+[.)])[ \t]+[^\n]+(?:\n|$)){2,}")
_DISPLAYED = re.compile(r"(?s)((?:[^\n]*\b(?:is|are))?):?\s*(\$\$.{1,400}?\$\$|\\\[.{1,400}?\\\])(?=[ .*]*(?:\n|$))")


def _asserted(before: str) -> bool:
    return _UNASSERTED.search(before) is None


def _last_candidate(text: str, candidates: Iterable[tuple[str, int]]) -> str | None:
    """The last candidate that can be read, or None. "" if a later one begins with a number but cannot be read.

    A candidate is a part of ``text`` and where it ends. What follows may take it back or correct it.
    """
    for candidate, end in reversed(list(candidates)):
        written = _read_candidate(candidate)
        if written is not None:
            corrected = _corrected(text, end, written) if written and end < len(text) else None
            return _at_last(text, end, written) if corrected is None else corrected
    return None


def _read_candidate(candidate: str) -> str | None:
    written = candidate
    if len(candidate) <= LONGEST_MATHEMATICS and re.search(r"\*|__|</", candidate):
        written = _EMPHASIS.sub(r"\2", candidate)
    written = trim(_AFTERTHOUGHT.sub("", _IN_BRACKETS.sub(_as_a_form, trim(written))))
    answer = right_hand_side(written)
    if _ENDS_WITH_UNIT.search(written) and (told := _one_of_its_forms(written)):
        return told
    if number(answer) is not None or ("=" not in answer and is_mathematics(answer)) or option(answer):
        return written
    if "=" in written and is_equations(written):
        return written
    if (told := _one_of_its_forms(written)) is not None:
        return told
    shorter = _without_reason(written)
    if shorter != written:
        return _read_candidate(shorter)
    sentence = in_a_sentence(written) or in_a_sentence(candidate)
    return "" if sentence is None and _BEGINS_WITH_NUMBER.match(answer) else sentence


def _as_a_form(bracket: re.Match[str]) -> str:
    """A bracket at the end, such as "(90 minutes)", as another form if it measures what stands before it."""
    first, again = bracket.string[: bracket.start()], bracket["again"] or ""
    ratio = unit_ratio(again, first) if again and reading(first) else None
    size = real_value(ratio) if ratio not in (None, 1) else None
    exact = size and 1 in size[0].as_integer_ratio()  # inches in centimeters are rounded
    if again and not exact and (ratio != 1 or " " in again.removesuffix(" percent")):
        return bracket[0]
    return f", i.e. {again}" if again else f", {bracket[1]}"


def _without_reason(text: str) -> str:
    """``text`` without a reason at its end, unless this computes something else.

    >>> _without_reason("5, because 2+3=5"), _without_reason("5 because 4+2=6"), _without_reason("5, not 6")
    ('5', '5 because 4+2=6', '5')
    """
    reason = _REASON.search(text)
    if reason is None:
        return text
    head, shown = trim(text[: reason.start()]), re.findall(r"(?<![A-Za-z] )=\s*([^=,;]+)", reason[0])
    remark, told = reason["remark"], reason[0]
    if (remark or _LETTERS.search(told)) and _AFFIRMED.search(told):
        return text
    if remark and (" and " in told or _RIVAL.search(told) or not surrounds(_ASIDE.sub(" ", told), False)):
        return text
    value = in_a_sentence(head) or right_hand_side(head)
    differs = [same_answer(right_hand_side(trim(one)), value) is False for one in shown]
    return text if differs and all(differs) else head


def _one_of_its_forms(text: str) -> str | None:
    r"""The first form of an answer that is told in two forms, "" if the two differ, and None if it has one form.

    Words may be one of the two, such as "all x of at least 2". They may have the numbers of the formula only.

    >>> [_one_of_its_forms(text) for text in ("1/2, i.e. 50%", "1/2, i.e. 60%", r"16\pi ≈ 50.27", r"16\pi ≈ 53", "1/2", "2 or 3")]
    ['1/2', '', '16\\pi', '', None, None]
    >>> _one_of_its_forms("all x of at least 2, i.e. [2, ∞)"), _one_of_its_forms("not 2, i.e. [2, ∞)"), _one_of_its_forms("5, which is odd")
    ('[2, ∞)', '', '5')
    """  # noqa: E501
    if len(text) > LONGEST_MATHEMATICS:
        return None
    if text.count("$") % 2 == 0 and ("\\" in text or text.count("$") > 2):
        text = text.replace("$", "")
    joint = min(_FORMS.finditer(text), key=lambda one: (one["same"] is one["about"], "=" in one[0]), default=None)
    if joint is None:
        return None
    first, second = trim(text[: joint.start()]), trim(text[joint.end() :])
    head, other = reading(right_hand_side(first)), reading(right_hand_side(second))
    told = first if head else second
    if head and other:
        about = joint["about"] and unit_ratio(second, first) == 1
        about = about and same(("relation", ("≈",), head[0], other[0]), head[0])
        alike = about or same_answer(right_hand_side(second), right_hand_side(first))
    elif not joint["same"] or not (head or other):
        return None
    else:
        alike = set(re.findall(r"\d+", first)) <= set(re.findall(r"\d+", told))
        alike = alike and not _UNASSERTED.search(text) and not _AFFIRMED.search(text)
    return told if alike else None if joint[0].strip(" ,;").lower() == "or" else ""


def in_a_sentence(text: str) -> str | None:
    r"""The number of a sentence that has one and neither changes nor denies it, with its unit; else None.

    >>> in_a_sentence("She makes $18 every day."), in_a_sentence("There are seven eggs left"), in_a_sentence("It grew by 5 cm")
    ('$18', 'seven eggs left', '5 cm')
    >>> [in_a_sentence(f"She {rest}") for rest in ("does not make 18", "makes less than 18", "makes 18 or 19", "makes 18?")]
    [None, None, None, None]
    """  # noqa: E501
    if len(text) > LONGEST_MATHEMATICS:
        return None
    text = _without_reason(text)
    says = _PREDICATE.fullmatch(text)
    if says is not None and _introduces(says["before"]) and (whole := _read_candidate(says["told"])):
        return whole
    pieces = _FORMULA.split(text)
    before, *rest = pieces if len(pieces) > 1 else _NUMBER.split(plain(spelled_in_digits(text)))
    told, beside = [trim(one) for one in rest[::2]], rest[1::2]
    for place, words in enumerate(beside):
        unit, _, others = words.strip().partition(" ")
        if unit and words[0] == " " and (number(f"1 {unit}") not in (None, 1) or unit_of(unit)):
            told[place], beside[place] = f"{told[place]} {trim(unit)}", others
    after = re.sub(r"\(([^()]*)\)", r" \1 ", " ".join(beside))
    listed = re.search(r"\band\b", " ".join(beside[:-1]))  # as in 24 rolls and 24 cakes
    if not told or listed or not (surrounds(before, True) and surrounds(after, False) and reading(told[0])):
        return None
    return told[0] if all(same_answer(one, told[0]) for one in told) else None


def _introduces(before: str) -> bool:
    """Whether a clause such as "The 10th term" says what an answer is, and does not change it."""
    before = _ASIDE.sub(" ", before)
    return is_prose(before) and not _OPEN.search(before) and not _UNASSERTED.search(before)


def _corrected(text: str, end: int, answer: str) -> str | None:
    """What ``text`` says instead if it takes back the answer that ends at ``end``, "" if nothing; None if it stands."""
    taken_back = _TAKEN_BACK.search(text, end, end + 1000)
    if taken_back is None or _SUPPOSED.search(text[end : taken_back.start()]):
        return None
    told = _CORRECTED.findall(text, taken_back.start(), end + 1000) or [""]
    return None if told[-1] and same_answer(told[-1], right_hand_side(answer)) else told[-1]


def stated(text: str, truth: str) -> str | None:
    """What the statement that ``text`` marks as its answer tells of the kind of thing that ``truth`` is: an option, a date
    or a time, a set or the like, or words. None if it marks none, and "" if it takes this back.

    A thing is told if it is the only one of its kind there, and nothing beside it denies or changes it.

    >>> [stated(f"Answer: {told}", "Emma") for told in ("Emma", "It is **Emma**.", "Emma, who won", "Emma has it.")]
    ['Emma', 'Emma', 'Emma', 'Emma']
    >>> [stated(f"Answer: {told}", "Emma") for told in ("Emma or Ann", "not Emma", "Emma. No, Ann.", "Emma lost to Ann")]
    ['Emma or Ann', 'not Emma', '', 'Emma lost to Ann']
    >>> stated("Answer: It was on 3 May 2021.", "2021-05-03"), stated("Answer: I would pick D (12 cm)", "D")
    ('2021-05-03', 'D')
    """  # noqa: E501
    if (tree := reading(truth)) and tree[0][0] not in _COLLECTIONS and not (option(truth) or moment_of(truth)):
        return None  # a number or the like, which written_answer reads without its label
    text = spoken(text)[-LONGEST_TEXT:]
    lines = [(box, len(text))] if (box := boxed(text)) else []
    lines = lines or [(head[1], head.start(1)) for head in _HEADED.finditer(text)]
    lines = lines or [(line, start) for before, line, start in marked(text) if _asserted(before)]
    if not lines:
        return None
    line, start = lines[-1]
    line = _at_last(text, start + len(line), line)
    readings = list(_readings(line.strip(), truth)) or [""]
    told = next((told for told in readings if same_answer(told, truth)), readings[0])
    return told if _corrected(text, start + len(told), "") is None else ""


def _readings(line: str, truth: str) -> Iterator[str]:
    """What a line may tell: itself; the only thing of the kind of ``truth``; and in words, what it says of its subject,
    its subject, and what stands before a remark or in bold."""
    right, tree, moment = option(truth), reading(truth), moment_of(truth)
    if not (right or tree or moment):
        yield trim(line)
    if len(line) > LONGEST_MATHEMATICS or ((right or tree) and not (moment or re.search("[A-Za-z]{3}", line))):
        return
    whole = trim(_EMPHASIS.sub(r"\2", line))
    sentence = _first_sentence(whole)
    if right:
        rest = _without_others(whole, right[0])
        before, _, after = rest.partition(right[0])
        alone = not right[1] and set(_LETTERS.findall(rest)) == {right[0]} and re.search("[a-z]{3}", before)
        if alone and leaves(before.rstrip("([ "), after.lstrip(")]. ")) and not is_hedged(after.lstrip(")].,: ")):
            yield right[0]
    elif moment:
        found, before, after = moments(sentence)
        alike = all(same_moment(one, moment) and (one[-1] or not moment[-1]) for one in found)
        yield from [truth] if found and alike and leaves(before, after) else ()
    elif tree:
        told = [one for one in _GROUP.findall(sentence) if (kind := reading(one)) and kind[0][0] in _COLLECTIONS]
        before, *beside = _GROUP.split(sentence)
        if told and leaves(before, " ".join(beside)):
            yield from told[:1] if all(same_answer(one, told[0]) for one in told) else ()
    elif verdict := _VERDICT.fullmatch(whole):
        denied = verdict[1].lower() in ("yes", "true") and _UNASSERTED.search(verdict[2])
        if not denied and not _AFFIRMED.search(verdict[2]):
            yield verdict[1]
    else:
        head = trim(_without_reason(trim(_AFTERTHOUGHT.sub("", trim(sentence)))))
        yield from (whole, head)
        aside, bold = _REMARK.fullmatch(sentence), _BOLD.fullmatch(_first_sentence(line))
        if aside and leaves("", aside[2]):
            yield (head := trim(aside[1]))
        says, subject = _PREDICATE.fullmatch(head), _SUBJECT.fullmatch(head)
        before, itself, after = unfold(sentence).partition(normal(truth) if _WHOLLY.match(normal(truth)) else "\0")
        yield from [truth] if itself and re.fullmatch(r"s?(?!\w)\D*", after) and leaves(before, after) else ()
        predicate = says["told"] if says and _introduces(says["before"]) else head
        yield _ARTICLE.sub("", predicate)
        if (by := _BY.fullmatch(predicate)) and leaves(by[1], "") and not re.search(r"\band (?:it|s?he|they)\b", head):
            yield by[2]
        if subject and not (_HEDGED.search(subject[2]) or _RIVAL.search(subject[2])):
            yield subject[1]
        if bold and leaves(bold[1], bold[3]) and not _RIVAL.search(bold[3]):
            yield from _readings(bold[2], truth)


def leaves(before: str, after: str) -> bool:
    """Whether what stands before and after something that is told leaves it as it is: nothing denies or changes it.

    >>> leaves("The process is called ", " by chemists"), leaves("the day after ", ""), leaves("", " (or nothing)")
    (True, False, False)
    """
    if _SIGN.search(before + "\n" + after):
        return False
    before, after = (re.sub(r"[^\w\s'’]|[\d_]", " ", words) for words in (before, after))
    words = f"{before}\n{after}"
    return is_prose(before) and not (_UNASSERTED.search(words) or _HEDGED.search(words) or _ALTERS.search(words))


_SIGN = re.compile(r"[\\=<>+*^~¬|≠∉±√∪∩]|(?<!\w)-")
# labels that say it all
_WHOLLY = re.compile(r"(?:no|not|none|never|cannot|does|do|infinit\w*|all|every)\s\w|(?:undefined|impossible)$")
_COLLECTIONS = ("set", "tuple", "matrix", "union", "ratio", "base", "relation")
_GROUP = re.compile(r"\$\$?[^$]+\$\$?|\\\(.+?\\\)|[\[({][^()\[\]{}]*,[^()\[\]{}]*[\])}]|[0-9]+(?:\s?[:∶]\s?[0-9]+)+")
_BOLD = re.compile(
    r"(?i)((?:[^*]*(?:\b(?:is|are|was|were|be|called|named|as|by|in|on|at|from|facing)\s|['’]s\s|:\s))?(?:the\s|an?\s)?)\*\*([^*]+)\*\*([^*]*)"
)
_REMARK = re.compile(
    r"(?s)([^,:(—–]+?)(?:,\s+(?=(?:the|an?|wh\w+|in|on|at|of|from|for|as|with|near|by|one)\s)|:\s|\s[—–-]+\s|\s\()(.+)"
)
_ALTERS = re.compile(
    r"\b(?:than|before|after|until|once|besides?|behind|next|near|opposite|below|above|under|between|like|away|anything"
    r"|thought|says?|said|minus|plus|without|almost|nearly|worst|exclud\w+|eliminat\w+|reject\w+|one\sof|some|any|most"
    r"|each|every)\b|\b(?:of|to|past|till)\s+(?:the\s+)?\n|\n['’]s\b|\n.*\b(?:so|hence|thus)\b"
)
_ARTICLE = re.compile(r"(?:on |in )?(?:an? |the )?", re.IGNORECASE)
_BY = re.compile(  # a passive, and when or where it was
    r"((?:[a-z][a-z-]*\s){1,3}by)\s(.+?)(?:,?\s(?:in|on|at|around|about|during)(?:\s(?:the|early|late|of|[A-Z]\w*|\d\w*))+)*"
)
_PROPER = re.compile(r"(?i:yes|no|true|false)|[A-Z][\w'’.-]*(?:\s(?:(?:of|the|de|van|von)\s)?[A-Z][\w'’.-]*)*")
_VERDICT = re.compile(r"(yes|no|true|false)\b\s*[,.;:!—–(-]\s*(.*)", re.IGNORECASE | re.DOTALL)
_SUBJECT = re.compile(r"(.{1,40}?)\s+(?:is|was|has|had|won|wins|will|does|did|gets|got|comes)\s+(.*)", re.DOTALL)
_RIVAL = re.compile(r"(?<!\bof )\b[A-Z][a-z]|\b(?:than|first|second|third|last|less|more|before|after)\b")


def is_equations(text: str) -> bool:
    """Whether ``text`` is an equation with letters, or a list of equations such as ``a = 1, b = 2``.

    >>> [is_equations(text) for text in ("x^2+y^2=1", "a = 1, b = 2", "4 = 5", "1 = 2 = 3", "x")]
    [True, True, False, False, False]
    """
    tree = (reading(text) if len(text) <= LONGEST_MATHEMATICS else None) or [("",)]
    if tree[0][0] == "relation":
        return set(tree[0][1]) == {"="} and any(real_value(side) is None for side in tree[0][2:])
    return tree[0][0] == "list" and all(part[0] == "relation" for part in tree[0][1:])


def right_hand_side(text: str, variable: bool = True) -> str:
    r"""The right-hand side of ``text`` if it is one equation with arithmetic, or a ``variable``, on its left; else
    ``text``.

    >>> [right_hand_side(t) for t in ("x = 5", r"7 \times 3 = 21", "f(x)=x^2", "4 = 5", "1+1=2=2", "x+y=3", "Total cost = 5")]
    ['5', '21', 'x^2', '4 = 5', '1+1=2=2', 'x+y=3', '5']
    """  # noqa: E501
    left, _, right = text.partition("=")
    if not right.strip() or "=" in right or "\n" in text.strip() or len(text) > LONGEST_ANSWER:
        return text
    left = left.strip()
    arithmetic_left = _LEFT_ARITHMETIC.fullmatch(left) and _OPERATOR_AFTER_NUMBER.search(left)
    simple = arithmetic_left or (variable and _LEFT_VARIABLE.fullmatch(left) and _asserted(left))
    return trim(right) if simple else text


def _first_sentence(text: str) -> str:
    """``text`` up to the end of its first sentence, which a full stop inside a number does not end."""
    # after the letter of an option the whole text counts: what follows may be the option's own, or take it back
    first = re.split(r"(?<=[^\s.])(?<!\bRs)(?<!i\.e)(?<!\bapprox)[.!](?=[\s*_]|$)(?!\s*=)", text, maxsplit=1)[0]
    return text if first != text and _LETTER.fullmatch(plain(first).strip("* ")) else first
