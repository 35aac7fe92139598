"""What leaves a snippet's process: values that JSON holds and that mean the same everywhere."""

import math
from collections.abc import Callable, Collection
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_INTEGER_BITS = 10_000
"""Python prints integers of at most 4300 digits; larger ones are refused, or written as hexadecimal digits."""

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


_KINDS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_VIEWS: dict[str, type[Collection[Any]]] = {
    "keys": type({}.keys()),
    "items": type({}.items()),
    "values": type({}.values()),
}
_TEXTS: dict[str, type] = {"Decimal": Decimal, "Fraction": Fraction}
TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple)
}
"""The types that are values themselves, as in ``f([1, "a"], int)``."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """``value`` as JSON, from which :func:`decode` makes an equal value of Python's own types.

    A subclass counts as its kind: a Counter is a dict. ``other`` writes what is not plain.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() <= MAX_INTEGER_BITS else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    if isinstance(value, tuple | set | frozenset):
        name = next(name for name, kind in _KINDS.items() if isinstance(value, kind))
        return {name: [encode(item, other) for item in value]}
    for name, kind in _VIEWS.items():
        if isinstance(value, kind):
            return {name: [encode(item, other) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name, kind in _TEXTS.items():
        if isinstance(value, kind):
            return {name: str(value)}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return other(value)


def decode(record: Any, other: Callable[[Any], Any]) -> Any:
    """The value that a record of :func:`encode` stands for. ``other`` reads what is not plain.

    Raises:
        ValueError: :func:`encode` writes no such record. A program may have written anything.
    """
    if isinstance(record, list):
        return [decode(item, other) for item in record]
    if not isinstance(record, dict):
        return record
    if len(record) != 1:
        raise ValueError("not a record of a value")
    ((name, held),) = record.items()
    if name == "dict":
        return {decode(key, other): decode(item, other) for key, item in held}
    if name in _KINDS:
        return _KINDS[name](decode(item, other) for item in held)
    if name == "keys":
        return dict.fromkeys(decode(item, other) for item in held).keys()
    if name == "items":
        return dict(decode(item, other) for item in held).items()
    if name == "values":
        return dict(enumerate(decode(item, other) for item in held)).values()
    if name == "int":
        return int(held, 16)
    if name in ("bytes", "bytearray"):
        data = bytes.fromhex(held)
        return data if name == "bytes" else bytearray(data)
    if name == "complex":
        return complex(*held)
    if name == "range":
        return range(*held)
    if name in _TEXTS:
        return _TEXTS[name](held)
    if name == "type":
        return TYPES[held]
    return other(record)


def cut(text: str) -> str:
    """The beginning of ``text``, in :data:`SAID_BYTES` of UTF-8. A half of a surrogate pair becomes a question mark."""
    return text[:SAID_BYTES].encode("utf-8", "replace")[:SAID_BYTES].decode("utf-8", "ignore")
