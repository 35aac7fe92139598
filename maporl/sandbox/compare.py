"""Judges a program by tests of the form ``assert EXPRESSION == LITERAL``, outside the process of the program.

An assert that runs beside a program asks the program's own objects whether they are equal, and an object may always say
yes. Here the value of the expression leaves the sandbox, the literal never enters it, and the owner compares the two.
"""

import ast
from collections.abc import Sequence
from typing import Any

from maporl.sandbox.sandbox import Sandbox

_CALL = "maporl_value"
_PROGRAM = """{code}
{setup}
def maporl_plain(value):
    if value is None:
        return ["none", 0]
    if isinstance(value, bool):
        return ["value", bool(value)]
    for kind in (int, float, str):
        if isinstance(value, kind):
            return ["value", kind(value)]
    if isinstance(value, dict):
        return ["dict", [[maporl_plain(key), maporl_plain(item)] for key, item in value.items()]]
    for name, kind in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kind):
            return [name, [maporl_plain(item) for item in value]]
    raise TypeError
def {call}():
    return maporl_plain({expression})
"""


def judge(sandbox: Sandbox, code: str, setup: str, tests: Sequence[str]) -> list[bool | None]:
    """Return for each test whether the program passes it, or None if the test does not compare with a literal.

    The program is ``code`` and then ``setup``. Each test runs in a process of its own, which is not told the literal.

    Raises:
        SandboxError: the worker process does not start.
    """
    parts = [_parts(test) for test in tests]
    programs = [
        _PROGRAM.format(code=code, setup=setup, call=_CALL, expression=part[0]) for part in parts if part is not None
    ]
    outcomes = iter(sandbox.run_many(programs, _CALL))
    return [None if part is None else _equal(next(outcomes).value, part[1]) for part in parts]


def _parts(test: str) -> tuple[str, Any] | None:
    """Return the expression of a test and the value of its literal, or None if it has another form."""
    try:
        (node,) = ast.parse(test).body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Compare):
        return None
    compare = node.test
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq):
        return None
    try:
        expected = ast.literal_eval(compare.comparators[0])
        return (ast.unparse(compare.left), expected) if _value(_tagged(expected)) == expected else None
    except (ValueError, TypeError):
        return None


def _equal(record: Any, expected: Any) -> bool:
    try:
        return bool(_value(record) == expected)
    except (ValueError, TypeError, RecursionError):  # the program may have written any record
        return False


def _tagged(value: Any) -> Any:
    """Return a literal as the sandbox would return it. A kind that cannot come back raises a TypeError."""
    if value is None:
        return ["none", 0]
    if isinstance(value, bool | int | float | str):
        return ["value", value]
    if isinstance(value, dict):
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple | set):
        return [type(value).__name__, [_tagged(item) for item in value]]
    raise TypeError(type(value).__name__)


def _value(record: Any) -> Any:
    """Return the value that a record of ``maporl_plain`` stands for."""
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
