"""The tool ``calculator``: arithmetic on numbers, without names, calls or anything else that Python can do."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from maporl.environments.base import Tool
from trl_ext.process.parsing import parsed

LONGEST = 200
"""Most characters of an expression."""
MOST_DIGITS = 100
"""Most decimal digits of a number on the way. A power of two numbers of ten digits would fill the memory."""
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator() -> Tool:
    """Return the tool."""

    def calculate(expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: numbers with + - * / // % ** and parentheses, such as (3 + 4) * 2
        """
        return value_of(expression)

    return Tool.of(calculate, "calculator")


def value_of(expression: str) -> str:
    """Return the value of an arithmetic expression. It is exact, and rounded to 12 digits if it is not a whole number.

    >>> value_of("(3 + 4) * 2"), value_of("1/3"), value_of("0.1 + 0.2"), value_of("2 ** 10")
    ('14', '0.333333333333', '0.3', '1024')

    Raises:
        ValueError: it is not arithmetic, is too long, or has a number that is too large.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {LONGEST} are read")
    text = expression.strip().rstrip("=").replace("×", "*").replace("÷", "/").replace("^", "**").replace(",", "")
    try:
        tree = parsed(text, "eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r:.80} is not an arithmetic expression") from None
    value = _value(tree.body, text)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.12g}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # the text of a number is exact, where a float is not
        return _bounded(Fraction(ast.get_source_segment(text, node) or ""))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(node.op)](left, right)))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("only whole exponents are allowed")
    digits = len(str(max(abs(base.numerator), base.denominator)))
    if digits * abs(exponent.numerator) > 3 * MOST_DIGITS:
        raise ValueError(f"a power has more than {MOST_DIGITS} digits")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return value
