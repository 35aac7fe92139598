"""Judges a program by tests, of which those of the form ``assert EXPRESSION == LITERAL`` are judged outside its process.

An assert that runs beside a program asks the program's own objects whether they are equal, and an object may always say
yes. The value of the expression therefore leaves the sandbox, the literal never enters it, and the owner compares the two.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maporl.sandbox.outcomes import Outcome
from maporl.sandbox.sandbox import Sandbox
from maporl.sandbox.sandboxed.values import NotPlain, tagged


@dataclass(frozen=True)
class _Comparison:
    """A test that compares with a literal: its expression, the literal, and the text that it shows if it fails."""

    expression: str
    literal: Any
    message: str

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the test, from that of its expression."""
        if not outcome.ok and outcome.reason != "no_value":
            return outcome
        if outcome.ok and _equal(outcome.value, self.literal):
            return Outcome(None, "ok", outcome.printed)
        return Outcome(None, "error:AssertionError", outcome.printed, self.message)


def judge(sandbox: Sandbox, code: str, asserts: Sequence[str], setup: str = "") -> list[Outcome]:
    """Return an outcome for each of the ``asserts`` about a program, which is ``code`` and then ``setup``.

    All run in one process, as :meth:`maporl.sandbox.sandbox.Sandbox.run_asserts` says. An assert that compares with a
    literal is judged outside of it, because an object of the program may say that it is equal to everything.

    Raises:
        SandboxError: a worker process does not start.
    """
    comparisons = [_comparison(test) for test in asserts]
    statements = [test if found is None else found.expression for test, found in zip(asserts, comparisons, strict=True)]
    outcomes = sandbox.run_asserts(code, statements, setup, [found is not None for found in comparisons])
    return [o if found is None else found.judge(o) for o, found in zip(outcomes, comparisons, strict=True)]


def _comparison(test: str) -> _Comparison | None:
    """Return the parts of a test, or None if it has another form."""
    try:
        (node,) = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None
    if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Compare):
        return None
    compare = node.test
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq):
        return None
    said = f": {node.msg.value!s}" if isinstance(node.msg, ast.Constant) else ""
    try:
        expected = ast.literal_eval(compare.comparators[0])
        comparable = _value(tagged(expected)) == expected
        return _Comparison(ast.unparse(compare.left), expected, f"AssertionError{said}") if comparable else None
    except (ValueError, TypeError, NotPlain, RecursionError, MemoryError):
        return None


def _equal(record: Any, expected: Any) -> bool:
    try:
        return bool(_value(record) == expected)
    except (ValueError, TypeError, RecursionError):  # the program may have written any record
        return False


def _value(record: Any) -> Any:
    """Return the value that a record of ``tagged`` stands for."""
    tag, held = record
    if tag == "none":
        return None
    if tag == "value" and isinstance(held, bool | int | float | str):
        return held
    if tag == "dict":
        return {_value(key): _value(item) for key, item in held}
    if tag in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[tag](_value(item) for item in held)
    raise ValueError(f"unknown record {tag!r:.40}")
