"""Whether a program has the same outcome on every day and in every process, as far as its text tells.

What a program returned once is kept, and may be a label. So the outcome must not come from the clock, from chance
without a seed, or from an address in memory. It does not wall anything off: a program that hides what it does spoils
its own outcome only.
"""

import ast
import re

from trl_ext.process.parsing import parsed

_ATTRIBUTES = {"now", "today", "utcnow", "SystemRandom", "urandom", "getrandom"}
"""These words say it, whatever they are an attribute of."""
_FUNCTIONS = {
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns",
    "time.process_time", "time.process_time_ns", "time.thread_time", "time.localtime", "time.gmtime", "time.ctime",
    "time.asctime", "time.strftime", "time.clock_gettime", "uuid.uuid1", "uuid.uuid4", "timeit.timeit", "timeit.default_timer",  # noqa: E501
    "os.getpid", "os.times",
}  # fmt: skip
_MODULES = {"secrets", "tracemalloc", "resource"}
_BUILTINS = {"id", "hash"}
_WORDS = re.compile(
    rf"\b(?:{'|'.join({*_ATTRIBUTES, *_MODULES, *_BUILTINS, *(name.split('.')[0] for name in _FUNCTIONS), 'Random', 'seed'})})\b"  # noqa: E501
)
"""Without any of these words, no program needs to be read as Python."""


def repeatable(code: str) -> bool:
    """Whether nothing in ``code`` names the clock, chance without a seed, or an address in memory.

    >>> repeatable("import random\\ndef f(): return random.randint(1, 6)"), repeatable("import time\\nx = time.time()")
    (True, False)
    """
    if not _WORDS.search(code):
        return True
    try:
        nodes = list(ast.walk(parsed(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # it fails, every time
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported: dict[str, str] = {}  # what a name of the program is called in the library
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                imported[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return not any(_varies(name) for name in imported.values()) and not any(
        _node_varies(n, imported, bound) for n in nodes
    )


def _varies(name: str) -> bool:
    return name in _FUNCTIONS or name.split(".")[0] in _MODULES or name.rpartition(".")[2] in _ATTRIBUTES


def _node_varies(node: ast.AST, imported: dict[str, str], bound: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _ATTRIBUTES or _varies(_full_name(node, imported))
    if isinstance(node, ast.Name):
        return node.id in _BUILTINS - bound - imported.keys()
    if isinstance(node, ast.Call):
        unseeded = not node.args or (isinstance(node.args[0], ast.Constant) and node.args[0].value is None)
        named = any(keyword.arg in ("a", "x") for keyword in node.keywords)
        return unseeded and not named and _full_name(node.func, imported) in ("random.Random", "random.seed")
    return False


def _full_name(node: ast.AST, imported: dict[str, str]) -> str:
    """The name in the library that an expression such as ``d.datetime`` stands for, or an empty text."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _full_name(node.value, imported)):
        return f"{owner}.{node.attr}"
    return ""
