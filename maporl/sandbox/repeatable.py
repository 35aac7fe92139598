"""Tells programs whose outcome may be another one the next time. Their outcomes are neither labels nor kept."""

import ast
import re

_CLOCK = ("now", "today", "utcnow", "SystemRandom")
"""Attributes and names that read the clock or the system's random numbers."""
_ADDRESS = ("id", "hash")
"""Built-in functions of an object's address, which changes from process to process."""
_SEEDED = ("seed", "Random")
"""What takes its numbers from the system, unless it is given a seed."""
_ANY = re.compile(rf"\b({'|'.join((*_CLOCK, *_ADDRESS, *_SEEDED))})\b")


def is_repeatable(code: str) -> bool:
    """Return whether nothing that ``code`` names makes its outcome depend on the clock, on addresses or on chance.

    The module ``random`` is allowed without such names, because the sandbox seeds it. A program may still show an address
    by its text, as ``str(object())`` does. What uses outcomes must therefore not trust that they are repeatable.

    >>> is_repeatable("def f(): return 6 * 7"), is_repeatable("import datetime\\ndef f(): return datetime.date.today().day")
    (True, False)
    """
    if not _ANY.search(code):
        return True
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # it does not run
    nodes = list(ast.walk(tree))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return not any(_depends(node, own) for node in nodes)


def _depends(node: ast.AST, own: set[str]) -> bool:
    """Return whether ``node`` reads something that changes. ``own`` are the program's own variables."""
    if isinstance(node, ast.Attribute):
        return node.attr in _CLOCK
    if isinstance(node, ast.alias):
        return node.name in _CLOCK
    if isinstance(node, ast.Name):
        return node.id in (*_CLOCK, *_ADDRESS) and node.id not in own
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    seeds = [*node.args, *(keyword.value for keyword in node.keywords)]
    return name in _SEEDED and not any(isinstance(seed, ast.Constant) and seed.value is not None for seed in seeds)
