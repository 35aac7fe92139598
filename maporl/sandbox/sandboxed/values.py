"""What a snippet may return: values that JSON holds and that mean the same everywhere."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_INTEGER_BITS = 10_000
"""Python prints integers of at most 4300 digits; larger ones are refused."""

SAID_BYTES = 4096
"""Most bytes that are kept of what a snippet printed, and again of the last line of its error."""


class NotPlain(Exception):
    """A returned value that JSON cannot hold."""


def plain_value(value: Any) -> Any:
    """``value`` as JSON can hold it. Types are compared exactly, so that no method of the snippet's is called.

    Raises:
        NotPlain: JSON cannot hold it. A text with half of a surrogate pair is not plain either: no file can hold it.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str and not any("\ud800" <= character <= "\udfff" for character in value):
        return value
    if kind is int and value.bit_length() <= MAX_INTEGER_BITS:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is Fraction:
        return plain_value(value.numerator if value.denominator == 1 else float(value))
    if kind is Decimal and value.is_finite() and abs(value.adjusted()) < 1000:
        return plain_value(int(value) if value == int(value) else float(value))
    if kind in (list, tuple):
        return [plain_value(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {plain_value(key): plain_value(item) for key, item in value.items()}
    raise NotPlain(kind.__name__)


def tagged(value: Any) -> Any:
    """``value`` with the kind of each of its parts, so that a tuple comes back as a tuple. A subclass counts as its kind.

    Raises:
        NotPlain: it has a part of another kind.
    """
    if value is None:
        return ["none", 0]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return ["value", kind(value)]
    if isinstance(value, dict):
        return ["dict", [[tagged(key), tagged(item)] for key, item in value.items()]]
    for name, kinds in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kinds):
            return [name, [tagged(item) for item in value]]
    raise NotPlain(type(value).__name__)


def cut(text: str) -> str:
    """The beginning of ``text``, in :data:`SAID_BYTES` of UTF-8. A half of a surrogate pair becomes a question mark."""
    return text[:SAID_BYTES].encode("utf-8", "replace")[:SAID_BYTES].decode("utf-8", "ignore")
