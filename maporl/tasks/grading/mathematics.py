r"""Short mathematics: what counts as such, what is small enough to compute, and equality by math-verify."""

import re
from math import prod

from maporl.tasks.grading.numbers import LONGEST_ANSWER, number, plain
from maporl.tasks.grading.symbolic import Allowance, equal

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
    if len(text) > 2 * LONGEST_ANSWER:
        return False
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


def same_mathematics(answer: str, truth: str, allowance: Allowance | None = None) -> bool | None:
    """Whether two texts are equal as mathematics, by math-verify; None if ``truth`` cannot be read or computed.

    An answer that is not mathematics is wrong. So is one with several values, or with a claim about one, unless
    ``truth`` has such a structure too. So is one whose comparison uses up the ``allowance`` of CPU time.

    Raises:
        MathematicsError: the process that compares does not start, or is killed from outside again and again.
    """
    if not _is_computable(truth):
        return None
    value = number(truth)
    comparable = is_mathematics(answer) and not (
        _STRUCTURE.search(answer) and (value is not None or not _STRUCTURE.search(truth))
    )
    if value is not None and not comparable:
        return False
    return equal(f"${truth if value is None else value}$", f"${plain(answer)}$" if comparable else None, allowance)
