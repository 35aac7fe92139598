"""Parse Python where several threads do. Imports no torch.

CPython 3.11 counts the depth of a tree in one place for all threads. If a finalizer runs while one thread builds a
tree, another thread can begin one, and the first ends with a ``SystemError``.
"""

import ast
from threading import RLock
from typing import Any

_PARSING = RLock()  # a finalizer may parse, too


def parsed(source: str | bytes, mode: str = "exec") -> Any:
    """Return what :func:`ast.parse` does. It raises the same."""
    with _PARSING:
        try:
            return ast.parse(source, mode=mode)
        except SystemError:  # a library parses in another thread, and does not ask here
            return ast.parse(source, mode=mode)


def literal_of(text: str) -> Any:
    """Return what :func:`ast.literal_eval` does of a text. It raises the same."""
    return ast.literal_eval(parsed(text.lstrip(" \t"), "eval"))
