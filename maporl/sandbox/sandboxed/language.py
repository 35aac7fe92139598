"""The sandbox's first wall: which Python a snippet may be written in, and the builtins and modules it gets.

It refuses whatever could lead from a snippet's own values to the interpreter's: attribute names with underscores,
frames, metaclasses, attribute names given as strings, and every import that is not on the list.
"""

import ast
import builtins
import re
import string
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

# None offers everything public of a module but other modules. What is left out of the lists evaluates strings, or takes
# attribute names as strings, and would lead around this wall.
MODULES: dict[str, tuple[str, ...] | None] = {
    "__future__": None,
    "bisect": None,
    "collections": None,
    "dataclasses": ("dataclass", "asdict", "astuple", "replace", "is_dataclass"),
    "datetime": None,
    "decimal": None,
    "fractions": ("Fraction",),
    "functools": ("cache", "cached_property", "cmp_to_key", "lru_cache", "partial", "reduce", "total_ordering"),
    "heapq": None,
    "itertools": None,
    "math": None,
    "random": None,
    "re": None,
    "statistics": None,
    "string": (
        "ascii_letters", "ascii_lowercase", "ascii_uppercase", "capwords", "digits", "hexdigits", "octdigits",
        "printable", "punctuation", "whitespace",
    ),
    "typing": (
        "Any", "Callable", "Dict", "Final", "FrozenSet", "Generator", "Iterable", "Iterator", "List", "Literal",
        "Mapping", "NamedTuple", "NoReturn", "Optional", "Sequence", "Set", "Tuple", "Union",
    ),
}  # fmt: skip
# C code loads these for datetime and for the parser; a snippet never gets them
HIDDEN = ("_strptime", "time", "unicodedata")

BUILTINS = {
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr", "classmethod", "complex",
    "dict", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hash", "hex", "id", "int",
    "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "object", "oct", "ord", "pow",
    "property", "range", "repr", "reversed", "round", "set", "slice", "sorted", "staticmethod", "str", "sum",
    "super", "tuple", "zip", "NotImplemented", "Ellipsis", "__build_class__",
}  # fmt: skip

# methods a class may define; calling them by name does nothing that an operator does not
DUNDERS = {
    "__future__", "__name__", "__abs__", "__add__", "__and__", "__bool__", "__call__", "__contains__",
    "__delitem__", "__enter__", "__eq__", "__exit__", "__float__", "__floordiv__", "__ge__", "__getitem__",
    "__gt__", "__hash__", "__iadd__", "__imul__", "__index__", "__init__", "__int__", "__isub__", "__iter__",
    "__itruediv__", "__le__", "__len__", "__lt__", "__mod__", "__mul__", "__ne__", "__neg__", "__next__", "__or__",
    "__pos__", "__post_init__", "__pow__", "__radd__", "__repr__", "__reversed__", "__rfloordiv__", "__rmod__",
    "__rmul__", "__round__", "__rpow__", "__rsub__", "__rtruediv__", "__setitem__", "__str__", "__sub__",
    "__truediv__", "__xor__",
}  # fmt: skip
# the public face of named tuples
UNDERSCORED = DUNDERS | {"_asdict", "_fields", "_replace"}
# ways from a generator, coroutine, traceback, class or exception to frames and to the classes and modules behind them
INTROSPECTION = {
    "ag_await", "ag_code", "ag_frame", "cr_await", "cr_code", "cr_frame", "cr_origin", "f_back", "f_builtins", "f_code",
    "f_globals", "f_lasti", "f_lineno", "f_locals", "f_trace", "format_map", "gi_code", "gi_frame", "gi_yieldfrom",
    "mro", "obj", "tb_frame", "tb_next",
}  # fmt: skip


class Refused(Exception):
    """The syntax tree holds something that no snippet may use; the message names it."""


def check_tree(tree: ast.AST) -> None:
    """Check that no identifier and no import of ``tree`` leads out of the snippet's own values.

    Raises:
        Refused: one of them does.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            _check_modules(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            _check_modules([node.module if not node.level else "relative"])
        elif isinstance(node, ast.ClassDef) and node.keywords:
            raise Refused("a metaclass")
        elif isinstance(node, ast.Attribute):
            _check_attribute(node.attr, node.value)
        elif isinstance(node, ast.MatchClass):
            for name in node.kwd_attrs:
                _check_attribute(name, None)
        if not isinstance(node, ast.Constant):
            _check_identifiers(node)


def _check_modules(names: Any) -> None:
    for name in names:
        if name not in MODULES:
            raise Refused(f"import of {name}")


def _check_identifiers(node: ast.AST) -> None:
    """Check every text field of a node. In all nodes but constants, which are not checked, these are identifiers."""
    for _, value in ast.iter_fields(node):
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name.startswith("__") and name.endswith("__") and name not in DUNDERS:
                raise Refused(name)


def _check_attribute(name: str, owner: ast.AST | None) -> None:
    if (name.startswith("_") and name not in UNDERSCORED) or name in INTROSPECTION:
        raise Refused(f"attribute {name}")
    # format fields may read attributes, out of sight of this check unless the template is in plain sight
    if name == "format" and not (isinstance(owner, ast.Constant) and _plain_template(owner.value)):
        raise Refused("str.format with attributes or with a computed template")


def _plain_template(template: Any) -> bool:
    """Whether a format template, with its nested fields, names only values and none of their attributes or items."""
    if not isinstance(template, str):
        return False
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError:  # it is not a template at all, and str.format says so when it runs
        return True
    return all(
        name is None or (re.fullmatch(r"\w*", name) and _plain_template(specification or ""))
        for _, name, specification, _ in fields
    )


def safe_modules() -> dict[str, types.ModuleType]:
    """Stand-ins for the modules of ``MODULES`` by name. The real modules hold references to ``sys`` and ``os``."""
    offered = {}
    for name, chosen in MODULES.items():
        real = import_module(name)
        stand_in = types.ModuleType(name)
        names = chosen or getattr(real, "__all__", None) or [n for n in vars(real) if not n.startswith("_")]
        for attribute in names:
            value = getattr(real, attribute, None)
            if not isinstance(value, types.ModuleType):
                setattr(stand_in, attribute, value)
        offered[name] = stand_in
    return offered


def safe_builtins(report: Callable[..., NoReturn], offered: dict[str, types.ModuleType], output: int) -> dict[str, Any]:
    """The builtins of a snippet: the harmless ones, exceptions, and for every other a function that ends the snippet.

    ``report`` ends it with a reason. ``offered`` are the modules it may import. It may print ``output`` characters.
    """
    printed = 0

    def refuse(*args, **kwargs):
        report("forbidden")

    def load(name, globals=None, locals=None, fromlist=(), level=0):
        if name in HIDDEN:
            return sys.modules[name]
        return offered[name] if name in offered else report("forbidden")

    def show(*values, sep=" ", end="\n", file=None, flush=False):
        nonlocal printed
        printed += sum(len(str(value)) + 1 for value in values) + 1
        if printed > output:
            report("output")

    def kind(value, *rest):
        # with the class of a class, a snippet could make classes with any attributes
        if rest or isinstance(value, type):
            report("forbidden")
        return type(value)

    allowed: dict[str, Any] = {"__import__": load, "print": show, "type": kind}
    for name, value in vars(builtins).items():
        if name in BUILTINS or (isinstance(value, type) and issubclass(value, BaseException)):
            allowed[name] = value
        elif not name.startswith("_"):
            allowed.setdefault(name, refuse)
    return allowed
