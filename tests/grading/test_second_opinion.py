"""What sympy says of symbolic equality, and what grading says: each expression against another form of it, and a twin."""

import random

import sympy
from sympy import Expr, Integer, Rational, pi, sqrt

from maporl.grading import same_answer

X, Y = sympy.symbols("x y")
FORMS = (sympy.expand, sympy.factor, sympy.together, sympy.simplify, sympy.radsimp)
CASES = 40


def expression(rng: random.Random, depth: int, symbols: list[Expr]) -> Expr:
    """Return a random expression of fractions, roots, pi and ``symbols``."""
    if depth == 0:
        fraction = Rational(rng.randint(1, 9), rng.randint(2, 9))
        return rng.choice([Integer(rng.randint(1, 9)), fraction, sqrt(rng.randint(2, 7)), pi, *symbols])
    one, other = (expression(rng, depth - 1, symbols) for _ in range(2))
    made = [one + other, one - other, one * other, one ** rng.choice([2, 3]), one if other == 0 else one / other]
    return rng.choice(made)


def test_grading_says_of_forms_and_of_twins_what_sympy_says():
    differ = 0
    for seed in range(CASES):
        rng = random.Random(seed)
        right = expression(rng, rng.choice([1, 2, 3]), [X, Y] if seed % 2 else [])
        other = rng.choice(FORMS)(right)
        assert same_answer(sympy.latex(other), sympy.latex(right)) is True, (seed, sympy.latex(other), right)
        wrong = rng.choice([right + 1, right * 2, -right, right + Rational(1, 7), right**2])
        if sympy.simplify(wrong - right) != 0:
            differ += 1
            assert same_answer(sympy.latex(wrong), sympy.latex(right)) is not True, (seed, sympy.latex(wrong), right)
    assert differ > 0.9 * CASES
