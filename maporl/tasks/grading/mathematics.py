r"""Short mathematics: what counts as such, what is small enough to compute, and equality by math-verify."""

import re
import threading
from math import prod

from maporl.tasks.grading.numbers import number, plain

_LONGEST_MATHEMATICS = 200

_MATHEMATICS = re.compile(r"[A-Za-z0-9\s+\-*/^_{}()\[\]|.,!<>=%°&\\×·÷π≤≥±∞]+")
_COMMANDS = frozenset(
    str.split(
        "frac dfrac tfrac sqrt cdot times div pm mp pi left right sin cos tan cot sec csc arcsin arccos arctan log ln exp "
        "infty cup cap in le leq ge geq lt gt ne neq circ degree quad alpha beta gamma delta epsilon zeta theta lambda mu nu "
        "rho sigma tau phi varphi omega Delta Omega emptyset mathbb lfloor rfloor lceil rceil"
    )
)
_FUNCTIONS = frozenset(str.split("sin cos tan cot sec csc log exp sqrt"))
_TWO_LETTER_WORDS = frozenset(str.split("am an as at be by do go he if in is it me my no of on or so to up us we"))
_STRUCTURE = re.compile(  # several values, or a claim about one
    r"[=<>≤≥&±|_]|,(?![0-9]{3}(?![0-9]))|\\\\|\\(?:cup|cap|in|pm|mp|leq?|geq?|lt|gt|neq?|quad|emptyset)\b"
)
_POWER = re.compile(
    r"(?P<bracket>[)}\]]?)\s*(?:\^|\*\*)\s*(?P<exponent>\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\([^()]*\)|-?[\w.]+|\\[A-Za-z]+)"
)


def is_mathematics(text: str) -> bool:
    r"""Whether ``text`` is short mathematics, plain or in LaTeX, that has no words and is small enough to compute.

    >>> [is_mathematics(t) for t in ("x^2+2x+1", r"\frac{\sqrt{3}}{2}", "2^{10}", "(1, 2]", r"2\pi")]
    [True, True, True, True, True]
    >>> [is_mathematics(t) for t in ("no", "5 6", "5$ $6", "correct", "5+", "1=2=3", "9^{9^9}", "2^{99999}", "(9!)!")]
    [False, False, False, False, False, False, False, False, False]
    """
    text = re.sub(r"\\(?:begin|end)\{[pbv]?matrix\}", "", plain(text))
    if len(text) > _LONGEST_MATHEMATICS or not _MATHEMATICS.fullmatch(text) or text.count("=") > 1:
        return False
    if text.count("{") != text.count("}") or len(re.findall(r"[(\[]", text)) != len(re.findall(r"[)\]]", text)):
        return False
    if re.search(r"[0-9]\s+[0-9]|[-+*/^=<>_|\\]$|^[*/^_=]|\.\.|^\W*$", text):
        return False
    words = re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", " ", text))
    short = all((len(w) <= 2 and w.lower() not in _TWO_LETTER_WORDS) or w in _FUNCTIONS for w in words)
    return short and set(re.findall(r"\\([A-Za-z]+)", text)) <= _COMMANDS and _is_computable(text)


def _is_computable(text: str) -> bool:
    r"""Whether the powers and factorials in ``text`` stay small. Towers, and powers of long sums, would take for ever.

    >>> _is_computable("2^{2007}"), _is_computable("9^9^9"), _is_computable("(x+y+z)^{99}"), _is_computable("99999!")
    (True, False, False, False)
    """
    if len(text) > _LONGEST_MATHEMATICS:
        return False
    factorials = text.count("!") - text.count("!=")
    if factorials and (re.search(r"[)}!\]]\s*!|[0-9]{4,}\s*!|\^|\*\*", text)):
        return False
    powers = list(_POWER.finditer(text))
    if len(powers) != text.count("^") + text.count("**"):
        return False  # an exponent that is itself a power, or has brackets within brackets
    if any(re.match(r"\s*(?:\^|\*\*)", text[p.end() :]) or re.search(r"\^|\*\*", p["exponent"]) for p in powers):
        return False
    size = prod(int(digits) or 1 for p in powers for digits in re.findall(r"[0-9]{1,9}", p["exponent"]))
    if any(p["bracket"] for p in powers) and re.search(r"(?<!\\)\b[A-Za-z]|[0-9][A-Za-z]", text):
        return size <= 12
    return size * len(re.findall("[0-9]", text)) <= 20_000


def same_mathematics(answer: str, truth: str) -> bool | None:
    """Whether two texts are equal as mathematics, by math-verify; None if ``truth`` cannot be read or computed.

    An answer that is not mathematics is wrong. So is one with several values, or with a claim about one, unless
    ``truth`` has such a structure too.
    """
    if not _is_computable(truth):
        return None
    from math_verify import parse, verify  # sympy behind it takes a second to load

    # math-verify limits its time by signals, which only the main thread receives
    limit = 3 if threading.current_thread() is threading.main_thread() else None
    value = number(truth)
    gold = parse(f"${truth if value is None else value}$", parsing_timeout=limit)
    if not gold:
        return None
    if not is_mathematics(answer) or (
        _STRUCTURE.search(answer) and (value is not None or not _STRUCTURE.search(truth))
    ):
        return False
    return bool(verify(gold, parse(f"${plain(answer)}$", parsing_timeout=limit), timeout_seconds=limit))
