r"""Equality of mathematics that was read whole (:mod:`maporl.grading.expressions`). Every rule is a doctest.

Fractions are compared exactly. Other values are computed with more digits than the texts can distinguish: the precision
follows from the largest and the smallest number that occurs, so that neither ``3.1415926`` and π nor two tiny numbers
are equal by rounding. Expressions with letters are compared where the letters have :data:`SCALES` of values: two that
differ as functions differ there. Letters that count, as in a factorial, have :data:`WHOLE_NUMBERS`.

The work is bounded by :class:`Budget`, which counts the digits that are computed, so that no clock decides a grade.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from operator import mul, truediv
from typing import TYPE_CHECKING, Any

from maporl.grading.expressions import Tree

if TYPE_CHECKING:
    from mpmath.ctx_mp import MPContext

MOST_BITS = 6000
"""A number of more binary digits, before or after the point, is not computed. 2^{2007} is, 2^{9999} is not."""
MOST_LISTED = 64
"""A list or a set of more answers is not compared."""
SCALES = tuple(map(Fraction, ("3/8", "4/5", "8/5", "10/3", "38/3", "-3/5", "-29/10", "-46/3")))
"""About what the letters of an expression stand for, in turn. Each letter has a number of its own near each of them."""
WHOLE_NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 10, 27)
"""What a letter stands for that counts, such as n in n! or in (-1)^n: even, odd, multiples of 3 and powers of 2."""
_COUNTS = frozenset("ijklmnpqrsKLMN")
"""The letters in the bracket of a floor or a ceiling that stand for whole numbers only.

Others may be any number too.
"""
_LEAST_BITS = 416
_OWN = {"π": "pi", "e": "e", "i": "j", "\\imath": "j"}
_NAMES = {name: name for name in str.split("sin cos tan cot sec csc sinh cosh tanh coth")} | {
    "arc" + name: "a" + name for name in str.split("sin cos tan cot sec csc")
}
_STRUCTURES = frozenset(str.split("list set union tuple ratio matrix base where without congruent"))
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class NotComputed(ArithmeticError):
    """The value is not a number, or it is too large, or the tree has no value."""


@dataclass
class Budget:
    """The remaining budget of one comparison: the binary digits of all results together."""

    bits: int = 3_000_000

    def spend(self, bits: int) -> None:
        """Count ``bits``.

        Raises:
            NotComputed: nothing is left.
        """
        self.bits -= bits
        if self.bits < 0:
            raise NotComputed("the comparison takes too long")


@dataclass(frozen=True)
class Found:
    """A value, the binary digits with which it was computed, and those of the largest or smallest number on the way.

    ``real``: neither the value nor a number on the way is complex.
    """

    value: Any
    bits: int
    widest: int
    real: bool


def same_in_order(answer: Tree, truth: Tree, budget: Budget) -> bool:
    """As :func:`same`, but two lists are the same only in the same order."""
    if answer[0] == truth[0] == "list":
        return len(answer) == len(truth) and all(same(a, b, budget) for a, b in zip(answer[1:], truth[1:], strict=True))
    return same(answer, truth, budget)


def same(answer: Tree, truth: Tree, budget: Budget | None = None) -> bool:
    r"""Whether two trees are mathematically the same. What cannot be computed is the same only if it is written so.

    >>> from maporl.grading.expressions import read
    >>> def equal(answer, truth): return same(read(answer), read(truth))
    >>> equal("x^2+2x+1", "(x+1)^2"), equal("(x-1)^{20}", "(x+1)^{20}"), equal("3/2^{98}", "1/2^{98}")
    (True, False, False)
    >>> equal("3.1415926", r"\pi"), equal("101_2", "101"), equal("2, 1", "1, 2"), equal("(2, 1)", "(1, 2)"), equal("x=5", "5")
    (False, False, True, False, True)
    >>> equal("1<x<3", "(1,3)"), equal("1<x<3", "(1,3]"), equal("2x-y=-1", "y=2x+1"), equal(r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2")
    (True, False, True, True)
    >>> equal(r"\frac{\pi}{3}", r"60^\circ"), equal(r"\sin 30^\circ", r"\frac12"), equal(r"180^\circ-60^\circ", "60")
    (True, True, False)
    """  # noqa: E501
    try:
        return _same(_unwrapped(answer, truth), _unwrapped(truth, answer), budget or Budget())
    except (NotComputed, RecursionError):
        return answer == truth


def is_computable(tree: Tree) -> bool:
    r"""Whether what ``tree`` stands for is small enough to be computed. An interval and the like are.

    >>> from maporl.grading.expressions import read
    >>> [is_computable(read(t)) for t in ("2^{2007}", "9^{9^9}", "99999!", "(1, 2]", "1/0", "(x+y)^{99}")]
    [True, False, False, True, False, True]
    """
    budget = Budget()
    for part in _scalars(_spread(tree)):
        points = _points(part, part)
        try:
            if all(_at(part, point, False, budget) is None for point in points):
                return False
        except (NotComputed, RecursionError):
            return False
    return True


def real_value(tree: Tree) -> tuple[Fraction, bool] | None:
    r"""The real value of a tree without letters, and whether it is exact; else to 100 digits. None without such a
    value.

    >>> from maporl.grading.expressions import read
    >>> real_value(read("1/4")), float(real_value(read(r"\sqrt2"))[0]), real_value(read("x"))
    ((Fraction(1, 4), True), 1.4142135623730951, None)
    """
    if _letters(tree):
        return None
    try:
        computed = _at(tree, None, False, Budget())
    except (NotComputed, RecursionError):
        return None
    if computed is None:
        return None
    if isinstance(computed.value, Fraction):
        return computed.value, True
    value = _real(computed)
    return None if value is None else (_fraction(value), False)


# structures


def _same(a: Tree, b: Tree, budget: Budget) -> bool:
    if a == b:
        return True
    a, b = _spread(a), _spread(b)
    if a[0] == b[0] == "congruent":
        periods = real_value(("div", ("add", a[2], ("neg", b[2])), a[3]))
        names = a[1] == b[1] or None in (a[1], b[1])
        return names and a[3] == b[3] and periods is not None and periods[0].denominator == 1
    if "congruent" in (a[0], b[0]):
        return _same(a[2] if a[0] == "congruent" else a, b[2] if b[0] == "congruent" else b, budget)
    if "≈" in (_sign(a), _sign(b)):
        return any(_same(x, y, budget) for x in _approximated(a, budget) for y in _approximated(b, budget))
    a, b = _shortened(a, budget), _shortened(b, budget)
    if a[0] == b[0] == "relation":
        return _same_relation(a, b, budget)
    if "relation" in (a[0], b[0]):
        relation, other = (a, b) if a[0] == "relation" else (b, a)
        told: Tree | None = relation[3] if relation is a and _tells_a_quantity(relation) else _told(relation, budget)
        told = _region(relation) if told is None else told
        return told is not None and _same(*((told, other) if relation is a else (other, told)), budget)
    if (told := _pairs(a, b)) is not None:
        return _ordered(*told, budget)
    a, b = _regions(a), _regions(b)
    if a[0] in ("list", "set") and b[0] in ("list", "set"):
        return _unordered(a[1:], b[1:], budget)
    if a[0] == b[0] == "union":
        return _unordered(a[1:], b[1:], budget)
    if a[0] == b[0] == "tuple":
        return a[1] == b[1] and _ordered(a[2:], b[2:], budget)
    if a[0] == b[0] == "ratio":
        return _ordered(a[1:], b[1:], budget)
    if a[0] == b[0] == "matrix":
        rows = list(zip(a[2:], b[2:], strict=False))
        return a[1] == b[1] and len(a) == len(b) and all(_ordered(x, y, budget) for x, y in rows)
    if {a[0], b[0]} == {"ratio", "number"}:
        ratio, value = (a, b) if a[0] == "ratio" else (b, a)
        return len(ratio) == 3 and value[1].denominator != 1 and _same(("div", *ratio[1:]), value, budget)
    if {a[0], b[0]} & _STRUCTURES:
        return False
    return _same_value(a, b, budget)


def _ordered(a: Sequence[Tree], b: Sequence[Tree], budget: Budget) -> bool:
    return len(a) == len(b) and all(_same(x, y, budget) for x, y in zip(a, b, strict=True))


def _unordered(a: Sequence[Tree], b: Sequence[Tree], budget: Budget) -> bool:
    """Whether each of ``a`` has one of ``b`` that is the same, and none is left over."""

    def alike(one: Tree, other: Tree) -> bool:
        return one == other or ((one[0] == "set") == (other[0] == "set") and _same(one, other, budget))  # not {4} for 4

    return len(a) <= MOST_LISTED and paired(a, b, alike)


def paired(ones: Sequence[Any], others: Sequence[Any], alike: Callable[[Any, Any], bool | None]) -> bool:
    """Whether each of ``ones`` has one of ``others`` that is alike, and none is left over.

    >>> paired("abc", "CAB", lambda one, other: one == other.lower()), paired("aab", "abb", str.__eq__)
    (True, False)
    """
    left = list(others)
    for one in ones:
        met = next((place for place, other in enumerate(left) if alike(one, other)), None)
        if met is None:
            return False
        del left[met]
    return not left


def _unwrapped(tree: Tree, other: Tree) -> Tree:
    """The element of a set of one beside a value, and what stands in rows without brackets as a matrix or as a list."""
    if tree[:2] == ("matrix", "rows"):
        if other[0] == "matrix" or any(len(row) > 1 for row in tree[2:]):
            return ("matrix", "matrix", *tree[2:])
        return ("list", *(row[0] for row in tree[2:]))
    alone = tree[0] == "set" and len(tree) == 2 and other[0] not in ("set", "list", "relation")
    return tree[1] if alone and other != ("symbol", "∅") else tree


def _spread(tree: Tree) -> Tree:
    """``tree`` with a factor of a matrix multiplied into its entries, and with a set that is described as this set."""
    if tree[0] == "where":
        region = _region(tree[1]) if tree[1][0] == "relation" else _regions(tree[1])
        return tree if region is None or region[0] == "list" else region
    if tree[0] == "without" and tree[1] == ("symbol", "ℝ") and tree[2][0] == "set":
        return _outside(tree[2][1:]) or tree
    if tree == ("symbol", "∅"):
        return ("set",)
    names, told = tree[2:] if _sign(tree) == "=" else ((), ())
    if names[:1] == ("tuple",) and _is_name(names) and told[:2] == names[:2] and len(names) == len(told):
        return ("list", *(("relation", ("=",), *sides) for sides in zip(names[2:], told[2:], strict=True)))
    if tree[0] == "neg" and (inner := _spread(tree[1]))[0] == "matrix":
        return _each(inner, lambda entry: ("neg", entry))
    if tree[0] == "div" and (inner := _spread(tree[1]))[0] == "matrix":
        return _each(inner, lambda entry: ("div", entry, tree[2]))
    if tree[0] == "mul" and sum(factor[0] == "matrix" for factor in tree[1]) == 1:
        (matrix,) = (factor for factor in tree[1] if factor[0] == "matrix")
        others = tuple(factor for factor in tree[1] if factor[0] != "matrix")
        return _each(matrix, lambda entry: ("mul", (*others, entry), tree[2]))
    return tree


def _each(matrix: Tree, change: Any) -> Tree:
    if matrix[1] != "matrix":  # the factor of a determinant is not that of its entries
        return matrix
    return ("matrix", matrix[1], *(tuple(map(change, row)) for row in matrix[2:]))


# relations


def _sign(tree: Tree) -> str | None:
    return tree[1][0] if tree[0] == "relation" and len(tree[1]) == 1 else None


def _approximated(tree: Tree, budget: Budget) -> list[Tree]:
    """Both sides of an approximation that is one, to a hundredth; else ``tree`` alone."""
    if _sign(tree) != "≈":
        return [tree]
    left, right = tree[2:]
    if left[0] == "symbol" and left[1] not in _OWN:
        return [right]
    sides = [real_value(side) for side in (left, right)]
    if None in sides:
        return []
    (a, _), (b, _) = sides  # type: ignore[misc]  # None is not among them
    return [left, right] if abs(a - b) <= max(abs(a), abs(b)) / 100 else []


def _is_name(tree: Tree) -> bool:
    if tree[0] == "tuple":
        return all(part[0] == "symbol" for part in tree[2:])
    return tree[0] == "symbol" and tree[1] not in _OWN


def _told(relation: Tree, budget: Budget) -> Tree | None:
    """What a relation such as ``x = 5``, or a true equation in numbers, tells; None if it tells no value."""
    signs, sides = relation[1], relation[2:]
    if signs == ("∈",) and _is_name(sides[0]):
        return sides[1]
    if set(signs) != {"="}:
        return None
    if len(sides) == 2 and _is_name(sides[1]) and not _is_name(sides[0]):
        return sides[0]
    if len(sides) == 2 and (_is_name(sides[0]) or _is_area(sides[0]) or _same(*sides, budget)):
        return sides[1]
    return None


def _shortened(tree: Tree, budget: Budget) -> Tree:
    """A chain of equations whose later sides are all the same, such as x + y = 4 + 1 = 5 or A = πr^2 = 9π, as one."""
    if tree[0] != "relation" or len(tree[1]) == 1 or set(tree[1]) != {"="}:
        return tree
    named = tree[3:-1] if _letters(tree[-1]) else [side for side in tree[3:-1] if not _letters(side)]
    alike = all(_same(side, tree[-1], budget) for side in named)
    return ("relation", ("=",), tree[2], tree[-1]) if alike else tree


def _tells_a_quantity(relation: Tree) -> bool:
    """Whether an equation tells what a sum such as m + n is, a length or a sine. For x, y and z it is to be solved."""
    asked, value = relation[2:4]
    if relation[1] != ("=",) or real_value(value) is None or {"x", "y", "z"} & _letters(asked):
        return False
    if asked[0] == "add":
        return len(_letters(asked)) > 1 and all(map(_letters, asked[1:])) and not _holds(asked, "pow")
    return asked[:2] == ("call", "abs") or asked[1] in _NAMES


def _is_area(tree: Tree) -> bool:
    """Whether ``tree`` is a name of several letters, such as AB for the length of a line."""
    return tree[0] == "mul" and not tree[2] and all(_is_name(factor) for factor in tree[1])


def _same_relation(a: Tree, b: Tree, budget: Budget) -> bool:
    a, b = _renamed(_turned(a)), _renamed(_turned(b))
    if set(a[1]) == set(b[1]) == {"="}:
        names = [relation[2] for relation in (a, b) if _is_name(relation[2]) or _is_area(relation[2])]
        if len(names) == 2 and names[0] == names[1]:
            x, y = _told(a, budget), _told(b, budget)
            return x is not None and y is not None and _same(x, y, budget)
        if len(a) == len(b) == 4 and not any(_is_structure(side) for side in (*a[2:], *b[2:])):
            return _multiples(a, b, budget, None)
    if a[1] == b[1] and _ordered(a[2:], b[2:], budget):
        return True
    x, y = _region(a), _region(b)
    if x is not None and y is not None:
        return _letters(a) - {"∞"} == _letters(b) - {"∞"} and _same(x, y, budget)
    if len(a[1]) != 1 or len(b[1]) != 1 or any(_is_structure(side) for side in (*a[2:], *b[2:])):
        return False
    if a[1][0] in _TURNED and b[1][0] in (a[1][0], _TURNED[a[1][0]]):
        return _multiples(a, b, budget, 1 if a[1] == b[1] else -1)
    return a[1] == b[1] == ("!=",) and _multiples(a, b, budget, None)


def _is_structure(tree: Tree) -> bool:
    return tree[0] in _STRUCTURES or tree[0] == "relation"


def _turned(relation: Tree) -> Tree:
    """A chain of > and >= in the other direction."""
    signs, sides = relation[1], relation[2:]
    if len(signs) > 1 and set(signs) <= {">", ">="}:
        return ("relation", tuple(_TURNED[sign] for sign in reversed(signs)), *reversed(sides))
    return relation


def _renamed(relation: Tree) -> Tree:
    """A definition such as f(n) = n with the name of its argument made that of all."""
    name = relation[2][1] if relation[2][0] == "symbol" else ""
    function, bracket, argument = name.partition("(")
    argument = argument.removesuffix(")")
    if not bracket or len(argument) != 1 or not argument.isalpha():
        return relation
    replacements = {("symbol", argument): ("symbol", "(argument)"), relation[2]: ("symbol", f"{function}(argument)")}
    return _replaced(relation, replacements)


def _replaced(tree: Any, replacements: dict[Tree, Tree]) -> Any:
    if not isinstance(tree, tuple):
        return tree
    return replacements.get(tree) or tuple(_replaced(part, replacements) for part in tree)


def _multiples(a: Tree, b: Tree, budget: Budget, sign: int | None) -> bool:
    """Whether left minus right of two relations differ by a factor only, which has the ``sign`` if one is given."""
    zero = ("number", Fraction(0))
    x, y = (("add", relation[2], ("neg", relation[3])) for relation in (a, b))
    if not _letters(a) == _letters(b) != set() or _same_value(x, zero, budget) or _same_value(y, zero, budget):
        return False
    factor: Found | None = None
    for point in _points(x, y):
        sides = _both(x, y, point, False, budget)
        if sides[0] is None or sides[1] is None or sides[0].value == 0 or sides[1].value == 0:
            continue
        ratio = _quotient(sides[0], sides[1])
        factor = ratio if factor is None else factor
        if not _near(ratio, factor):
            return False
    return factor is not None and (sign is None or (_real(factor) or 0) * sign > 0)


def _quotient(x: Found, y: Found) -> Found:
    if isinstance(x.value, Fraction) and isinstance(y.value, Fraction):
        return Found(x.value / y.value, x.bits, x.widest, True)
    context = _context(max(x.bits, y.bits))
    value = _number(context, x.value) / _number(context, y.value)
    return Found(value, min(x.bits, y.bits), 2 * max(x.widest, y.widest) + 8, x.real and y.real)


def _region(relation: Tree) -> Tree | None:
    """The interval of a relation between one name and numbers, such as 1 < x <= 3, or None."""
    signs, sides = relation[1], relation[2:]
    if not set(signs) <= set(_TURNED):
        if signs == ("!=",) and _is_name(sides[0]):
            return _outside(sides[1:])
        if signs == ("∈",) and _is_name(sides[0]) and sides[1][0] in ("tuple", "union", "without"):
            return _spread(sides[1])
        return None
    if len(sides) == 2 and sides[0][:2] == ("call", "abs"):
        (sign,), inner = signs, sides[0][2]
        inner, *shift = inner[1:] if inner[0] == "add" else (inner,)  # |x - 2| < 3
        near, far = (("add", end, *(("neg", term) for term in shift)) for end in (("neg", sides[1]), sides[1]))
        if sign[0] == "<":
            return _region(("relation", (sign, sign), near, inner, far))
        return _regions(("list", ("relation", (sign,), inner, far), ("relation", (_TURNED[sign],), inner, near)))
    if len({sign[0] for sign in signs}) != 1 or len(sides) > 3:
        return None
    if signs[0][0] == ">":
        signs, sides = tuple(_TURNED[sign] for sign in reversed(signs)), tuple(reversed(sides))
    if len(sides) == 3:
        if not _is_name(sides[1]):
            return None
        return _interval("[" if "=" in signs[0] else "(", sides[0], sides[2], "]" if "=" in signs[1] else ")")
    if _is_name(sides[0]) and not _is_name(sides[1]):
        return _interval("(", None, sides[1], "]" if "=" in signs[0] else ")")
    if _is_name(sides[1]) and not _is_name(sides[0]):
        return _interval("[" if "=" in signs[0] else "(", sides[0], None, ")")
    return None


def _outside(points: Sequence[Tree]) -> Tree | None:
    """The real numbers without these, as intervals; None if the order of several is not known."""
    values = [real_value(point) for point in points]
    if len(points) != 1 and None in values:
        return None
    order = sorted(range(len(points)), key=lambda place: values[place] or 0)
    ends = [None, *(points[place] for place in order), None]
    return ("union", *(_interval("(", low, high, ")") for low, high in pairwise(ends)))


def _interval(opening: str, low: Tree | None, high: Tree | None, closing: str) -> Tree:
    infinity = ("symbol", "∞")
    return ("tuple", opening + closing, low or ("neg", infinity), high or infinity)


def _regions(tree: Tree) -> Tree:
    """Several inequalities as the union of their intervals, and the whole line as the real numbers."""
    if tree[0] == "list" and all(part[0] == "relation" for part in tree[1:]):
        regions = [_region(part) for part in tree[1:]]
        if None not in regions and len(_letters(tree)) == 1:
            if all(part[1] == ("!=",) for part in tree[1:]):
                return _outside([part[3] for part in tree[1:]]) or tree
            return ("union", *regions)
    if tree[0] == "union" and all(part[0] == "set" for part in tree[1:]):
        return ("set", *(item for part in tree[1:] for item in part[1:]))
    if tree == _interval("(", None, None, ")"):
        return ("symbol", "ℝ")
    return tree


def _pairs(a: Tree, b: Tree) -> tuple[Sequence[Tree], Sequence[Tree]] | None:
    """The values of names such as ``a = 1, b = 2``, and the values to which they correspond in this order."""
    for one, other, turned in ((a, b, False), (b, a, True)):
        if one[0] != "list" or other[0] not in ("list", "tuple"):
            continue
        values = other[1:] if other[0] == "list" else other[2:] if other[1] == "()" else ()
        names = [part[2] for part in one[1:] if _sign(part) == "=" and (_is_name(part[2]) or _is_area(part[2]))]
        if len(names) == len(set(names)) == len(values) == len(one) - 1 and all(v[0] != "relation" for v in values):
            told = tuple(part[3] for part in one[1:])
            letters = sorted(range(len(names)), key=lambda place: str(names[place][1]))
            first = [ord(str(names[place][1])[0]) for place in letters]
            if first in ([first[0]] * len(first), list(range(first[0], first[0] + len(first)))):
                told = tuple(told[place] for place in letters)  # x before y, in whatever order they are told
            return (values, told) if turned else (told, values)
    return None


# values


def _same_value(a: Tree, b: Tree, budget: Budget) -> bool:
    turned = _holds(a, "degrees") != _holds(b, "degrees")
    # 60 degrees answer a label "60", and also the label "pi/3"
    return _same_function(a, b, False, budget) or (turned and _same_function(a, b, True, budget))


def _same_function(a: Tree, b: Tree, in_radians: bool, budget: Budget) -> bool:
    met, real, complex_met = 0, 0, True
    for point in _points(a, b):
        x, y = _both(a, b, point, in_radians, budget)
        if x is None or y is None:
            if (x is None) != (y is None) and point is None:
                return False
            continue
        equal = _near(x, y)
        met += 1
        if x.real and y.real:
            real += 1
            if not equal:
                return False
        else:
            complex_met = complex_met and equal
    return real >= 2 or (met > 0 and complex_met)


def _points(a: Tree, b: Tree) -> Iterator[dict[str, Fraction] | None]:
    """What the letters of both trees stand for, in turn; None once if they have none."""
    letters = sorted(_letters(a) | _letters(b))
    if not letters:
        yield None
        return
    whole, rounded = _whole_letters(a) | _whole_letters(b), _rounded_letters(a) | _rounded_letters(b)
    whole |= rounded & _COUNTS
    for counted in (whole, whole | rounded) if rounded - whole else (whole,):
        for place in range(len(WHOLE_NUMBERS if counted else SCALES)):
            scale = SCALES[place % len(SCALES)]
            point = {letter: scale * (1 + _part(letter, place)) for letter in letters}
            sums = 0
            for order, letter in enumerate(sorted(counted)):  # n is mostly larger than k, and not always
                number = WHOLE_NUMBERS[(place + 5 * order) % len(WHOLE_NUMBERS)]
                sums = number + (sums if place % 3 else 0)
                point[letter] = Fraction(sums)
            yield point


def _whole_letters(tree: Any) -> set[str]:
    """The letters that must be whole numbers: in factorials, binomials, gcds, and exponents of negative numbers."""
    if not isinstance(tree, tuple) or not tree:
        return set()
    if tree[0] == "pow" and tree[1][0] == "neg" and not _letters(tree[1]):
        return _letters(tree[2])
    counts = tree[0] == "factorial" or tree[:2] in (("call", "binomial"), ("call", "gcd"), ("call", "lcm"))
    return _letters(tree) if counts else set().union(*map(_whole_letters, tree))


def _rounded_letters(tree: Any) -> set[str]:
    """The letters in the brackets of floors and ceilings."""
    rounds = isinstance(tree, tuple) and tree[:2] in (("call", "floor"), ("call", "ceil"))
    return _letters(tree) if rounds else set().union(*map(_rounded_letters, tree if isinstance(tree, tuple) else ()))


@lru_cache(4096)
def _part(letter: str, place: int) -> Fraction:
    return Fraction(random.Random(f"{letter} {place}").randrange(1, 64), 97)


def _letters(tree: Any) -> set[str]:
    if isinstance(tree, tuple) and tree[:1] == ("symbol",):
        return set() if tree[1] in _OWN else {tree[1]}
    return set().union(*map(_letters, tree)) if isinstance(tree, tuple) else set()


def _holds(tree: Any, kind: str) -> bool:
    return isinstance(tree, tuple) and (tree[:1] == (kind,) or any(_holds(part, kind) for part in tree))


def _scalars(tree: Tree) -> Iterator[Tree]:
    """The parts of ``tree`` that stand for a number each."""
    if tree[0] == "base":
        return
    if not _is_structure(tree):
        yield tree
        return
    parts = [part for part in tree[1:] if isinstance(part, tuple) and part and isinstance(part[0], str | tuple)]
    for part in parts:
        if isinstance(part[0], tuple):  # a row
            for entry in part:
                yield from _scalars(entry)
        elif part[0] not in _TURNED and part[0] not in ("=", "!=", "∈", "≈", "≡"):
            yield from _scalars(part)


def _both(
    a: Tree, b: Tree, point: dict[str, Fraction] | None, in_radians: bool, budget: Budget
) -> tuple[Found | None, Found | None]:
    """The values of two trees at a point, each with the precision that both need."""
    x, y = (_at(tree, point, in_radians, budget) for tree in (a, b))
    if x is not None and y is not None and not (isinstance(x.value, Fraction) and isinstance(y.value, Fraction)):
        bits = _needed(max(x.widest, y.widest))
        if bits > min(x.bits, y.bits):
            x, y = (_at(tree, point, in_radians, budget, bits) for tree in (a, b))
    return x, y


def _needed(widest: int) -> int:
    """The precision at which the error of a value lies far below the smallest difference of two."""
    return 3 * widest + 320


def _at(
    tree: Tree, point: dict[str, Fraction] | None, in_radians: bool, budget: Budget, bits: int = _LEAST_BITS
) -> Found | None:
    """The value of ``tree`` where letters have the values of ``point``, or None if it has none there."""
    for _ in range(3):
        worker = _Worker(point or {}, in_radians, bits, budget)
        try:
            value = worker.value(tree)
        except NotComputed:
            if budget.bits < 0:
                raise
            return None
        except (ArithmeticError, ValueError):  # such as a division by zero, or a logarithm of it
            return None
        if isinstance(value, Fraction) or _needed(worker.widest) <= bits:
            return Found(value, bits, worker.widest, worker.real)
        bits = _needed(worker.widest)
    return None


def _near(x: Found, y: Found) -> bool:
    """Whether two values are equal: exactly as fractions, else up to the error of how they were computed."""
    if isinstance(x.value, Fraction) and isinstance(y.value, Fraction):
        return x.value == y.value
    context = _context(max(x.bits, y.bits))
    difference = _number(context, x.value) - _number(context, y.value)
    return difference == 0 or context.mag(difference) <= 2 * max(x.widest, y.widest) + 64 - min(x.bits, y.bits)


def _real(computed: Found) -> Any:
    """The value as a real number, or None if it is complex by more than rounding."""
    value = computed.value
    if isinstance(value, Fraction):
        return value
    small = value.imag == 0 or _context(computed.bits).mag(value.imag) <= 2 * computed.widest + 64 - computed.bits
    return value.real if small else None


def _fraction(value: Any) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    return (-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent


def _number(context: "MPContext", value: Any) -> Any:
    return context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else context.convert(value)


_local = threading.local()


def _context(bits: int) -> "MPContext":
    """The arithmetic of this thread, with so many binary digits. The module mpmath has one for all threads."""
    if not hasattr(_local, "context"):
        from mpmath.ctx_mp import MPContext  # slow to import

        _local.context = MPContext()
    _local.context.prec = bits
    return _local.context


class _Worker:
    """Computes one tree at one point."""

    def __init__(self, point: dict[str, Fraction], in_radians: bool, bits: int, budget: Budget) -> None:
        self.point, self.in_radians, self.bits, self.budget = point, in_radians, bits, budget
        self.widest = 0
        self.real = True
        self._mp: MPContext | None = None

    @property
    def mp(self) -> "MPContext":
        if self._mp is None:
            self._mp = _context(self.bits)
        return self._mp

    def value(self, tree: Tree) -> Any:
        method = getattr(self, "_" + tree[0], None)
        if method is None:
            raise NotComputed(tree[0])
        return self.seen(method(*tree[1:]))

    def seen(self, value: Any) -> Any:
        """``value``, after its size was looked at."""
        if isinstance(value, Fraction):
            size = max(value.numerator.bit_length(), value.denominator.bit_length())
        else:
            parts = (value.real, value.imag) if hasattr(value, "_mpc_") else (value,)
            if not all(self.mp.isfinite(part) for part in parts):
                raise NotComputed("no finite number")
            self.real = self.real and (len(parts) == 1 or not self._counts(parts[1], parts))
            size = max((abs(self.mp.mag(part)) for part in parts if part != 0 and self._counts(part, parts)), default=0)
        if size > MOST_BITS:
            raise NotComputed("too large")
        self.widest = max(self.widest, size)
        self.budget.spend(32 + (0 if isinstance(value, Fraction) else self.bits // 8))
        return value

    def _counts(self, part: Any, parts: Sequence[Any]) -> bool:
        """Whether a part of a complex number is more than the rounding of the other."""
        rounded = max(map(self.mp.mag, filter(None, parts)), default=0) - self.bits // 2
        return len(parts) == 1 or (part != 0 and self.mp.mag(part) > rounded)

    def mpf(self, value: Any) -> Any:
        return _number(self.mp, value) if isinstance(value, Fraction) else value

    def _number(self, value: Fraction) -> Fraction:
        return value

    def _symbol(self, name: str) -> Any:
        constant = _OWN.get(name)
        if constant == "j":
            return self.mp.mpc(0, 1)
        return self.point[name] if constant is None else +getattr(self.mp, constant)

    def _add(self, *terms: Tree) -> Any:
        total, *others = (self.value(term) for term in terms)
        for other in others:
            exact = isinstance(total, Fraction) and isinstance(other, Fraction)
            total = self.seen(total + other if exact else self._sum(self.mpf(total), self.mpf(other)))
        return total

    def _sum(self, a: Any, b: Any) -> Any:
        total = a + b
        # what is left of a difference of equals is rounding, whose size says nothing
        sized = total != 0 and a != 0 and b != 0
        rounding = sized and self.mp.mag(total) < max(self.mp.mag(a), self.mp.mag(b)) - self.bits + 64
        return self.mp.mpf(0) if rounding else total

    def _mul(self, factors: Sequence[Tree], divisors: Sequence[Tree]) -> Any:
        total: Any = Fraction(1)
        for factor in factors:
            total = self._combined(mul, total, self.value(factor))
        for divisor in divisors:
            total = self._combined(truediv, total, self.value(divisor))
        return total

    def _combined(self, operate: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        return self.seen(operate(a, b) if exact else operate(self.mpf(a), self.mpf(b)))

    def _div(self, top: Tree, bottom: Tree) -> Any:
        return self._combined(truediv, self.value(top), self.value(bottom))

    def _neg(self, tree: Tree) -> Any:
        return -self.value(tree)

    def _degrees(self, tree: Tree) -> Any:
        value = self.value(tree)
        return self.mpf(value) * self.mp.pi / 180 if self.in_radians else value

    def _pow(self, base: Tree, exponent: Tree) -> Any:
        return self.power(self.value(base), self.value(exponent))

    def power(self, base: Any, exponent: Any) -> Any:
        whole = isinstance(exponent, Fraction) and exponent.denominator == 1
        if base == 0:
            if exponent == 0 or not whole or exponent < 0:
                raise NotComputed("a power of zero")
            return Fraction(0)
        if isinstance(base, Fraction) and whole:
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * (size if size > 1 else 0) > 2 * MOST_BITS:
                raise NotComputed("too large")
            return base ** int(exponent)
        base, power = self.mpf(base), self.mpf(exponent)
        if abs(power) * (abs(self.mp.mag(base)) + 1) > 2 * MOST_BITS:
            raise NotComputed("too large")
        self.budget.spend(self.bits)
        return base ** int(exponent) if whole else base**power

    def _factorial(self, tree: Tree) -> Any:
        value = self.value(tree)
        if isinstance(value, Fraction) and value.denominator == 1:
            if not 0 <= value <= 1000:
                raise NotComputed("too large")
            return Fraction(math.factorial(int(value)))
        return self.gamma(value + 1)

    def gamma(self, value: Any) -> Any:
        value = self.mpf(value)
        if abs(value) > 200 or self.bits > 2048:
            raise NotComputed("too large")
        self.budget.spend(40 * self.bits)
        return self.mp.gamma(value)

    def _call(self, name: str, *trees: Tree) -> Any:
        if name in _NAMES:
            before = self.in_radians
            self.in_radians = True  # the sine of 30 degrees is a half, whatever is asked for
            try:
                value = self.mpf(self.value(trees[0]))
            finally:
                self.in_radians = before
            self.budget.spend(2 * self.bits)
            return getattr(self.mp, _NAMES[name])(value)
        return getattr(self, name)(*(self.value(tree) for tree in trees))

    def exp(self, value: Any) -> Any:
        return self.power(+self.mp.e, value)

    def ln(self, value: Any) -> Any:
        self.budget.spend(2 * self.bits)
        return self.mp.ln(self.mpf(value))

    def log(self, value: Any, base: Any) -> Any:
        return self.ln(value) / self.ln(base)

    def abs(self, value: Any) -> Any:
        return abs(value)

    def root(self, value: Any, degree: Any) -> Any:
        if not isinstance(degree, Fraction) or degree <= 0:
            raise NotComputed("a root of this degree")
        if isinstance(value, Fraction) and degree == 2 and value >= 0:
            top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
            if top * top == value.numerator and bottom * bottom == value.denominator:
                return Fraction(top, bottom)
        if degree.denominator == 1 and degree % 2 and (not hasattr(value, "_mpc_")) and value < 0:
            return -self.power(-value, 1 / degree)
        return self.power(value, 1 / degree)

    def whole(self, value: Any) -> Any:
        """A value that is a whole number but for rounding as this number."""
        if hasattr(value, "_mpc_"):
            raise NotComputed("no real number")
        if isinstance(value, Fraction):
            return value
        nearest = self.mp.nint(value)
        return Fraction(int(nearest)) if abs(value - nearest) < self.mp.ldexp(1, -self.bits // 3) else value

    def floor(self, value: Any) -> Any:
        value = self.whole(value)
        return Fraction(math.floor(value) if isinstance(value, Fraction) else int(self.mp.floor(value)))

    def ceil(self, value: Any) -> Any:
        return -self.floor(-value)

    def binomial(self, n: Any, k: Any) -> Any:
        if all(isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 5000 for value in (n, k)):
            if min(k, n - k) > 500:
                raise NotComputed("too large")
            return Fraction(math.comb(int(n), int(k)))
        return self.gamma(n + 1) / (self.gamma(k + 1) * self.gamma(n - k + 1))

    def gcd(self, *values: Any) -> Any:
        return Fraction(math.gcd(*map(self.integer, values)))

    def lcm(self, *values: Any) -> Any:
        return Fraction(math.lcm(*map(self.integer, values)))

    def integer(self, value: Any) -> int:
        if not isinstance(value, Fraction) or value.denominator != 1:
            raise NotComputed("no whole number")
        return int(value)

    def max(self, *values: Any) -> Any:
        return max(map(self.whole, values))

    def min(self, *values: Any) -> Any:
        return min(map(self.whole, values))
