"""Check the kinds of a trainer's parts, before any of them is used."""

from collections.abc import Mapping
from typing import Any


def check_kinds(parts: dict[str, tuple[Any, type]]) -> None:
    """Check that every part is of its kind, or None.

    Args:
        parts: for each argument's name, what was given, and the class that it should be of.

    Raises:
        ValueError: a part is of another kind. The message says which, and what was expected.
    """
    for name, (part, kind) in parts.items():
        if isinstance(part, type) and issubclass(part, kind):
            raise ValueError(f"{name}: expected an object, got the class {part.__name__}; write {part.__name__}(...)")
        if part is None or isinstance(part, kind):
            continue
        expected = "a mapping" if kind is Mapping else f"a maporl.{kind.__name__}"
        raise ValueError(f"{name}: expected {expected}, got {type(part).__name__} {part!r:.60}")
