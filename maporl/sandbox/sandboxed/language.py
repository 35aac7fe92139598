"""The sandbox's first wall: which Python a snippet may be written in, and the builtins and modules it gets.

It refuses whatever could lead from a snippet's own values to the interpreter's: attribute names with underscores,
frames, metaclasses, attribute names given as strings, and every import that is not on the list. It also refuses the
clock, and every random number comes from a seed, because the outcome of a snippet is to be a function of its text.
"""

import ast
import builtins
import dataclasses
import inspect
import random
import re
import string
import sys
import types
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any, NoReturn
from unicodedata import normalize

from .values import SAID_BYTES

# None offers everything public of a module but other modules. What is left out of the lists evaluates strings, or takes
# attribute names as strings, and would lead around this wall.
MODULES: dict[str, tuple[str, ...] | None] = {
    "__future__": None,
    "bisect": None,
    "collections": None,
    "dataclasses": ("asdict", "astuple", "replace", "is_dataclass"),  # and checked_dataclass
    "datetime": None,
    "decimal": None,
    "fractions": ("Fraction",),
    "functools": ("cache", "cmp_to_key", "lru_cache", "partial", "reduce", "total_ordering"),  # and cached_property
    "heapq": None,
    "itertools": None,
    "math": None,
    "random": (),  # but SeededRandom and its methods
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
    "dict", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hex", "int",
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
# ways from a frame, class or exception to frames and to the classes and modules behind them
INTROSPECTION = {
    "f_back", "f_builtins", "f_code", "f_generator", "f_globals", "f_lasti", "f_lineno", "f_locals", "f_trace",
    "f_trace_lines", "f_trace_opcodes", "format_map", "mro", "obj", "register", "with_traceback",
}  # fmt: skip
# the same from a generator, coroutine, asynchronous generator, traceback or code object
INTROSPECTION_PREFIXES = ("ag_", "co_", "cr_", "gi_", "tb_")
CLOCK = {"now", "today", "utcnow"}
# those of a decimal.Context stay when it is gone, and then read and write memory that is another object's
DANGLING = {"flags", "traps"}
# the classes that a pattern with a position, such as ``int(x)``, gives the whole value; every other class chooses by its
# __match_args__ which attribute it gives
SELF_MATCHING = {"bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"}


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
            _check_pattern(node, tree)
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


def _check_pattern(pattern: ast.MatchClass, tree: ast.AST) -> None:
    """Check which attributes a class pattern reads: those after a name, and those that the class has for positions."""
    for name in pattern.kwd_attrs:
        _check_attribute(name, None)
    if not pattern.patterns:
        return
    if not isinstance(pattern.cls, ast.Name) or pattern.cls.id not in SELF_MATCHING:
        raise Refused("a class pattern with a position")
    if any(pattern.cls.id in _bound(node) for node in ast.walk(tree)):
        raise Refused(f"a pattern of {pattern.cls.id}, which is another class here")


def _bound(node: ast.AST) -> list[str]:
    """The identifiers that a node may bind: all its texts, unless it only reads a variable."""
    if isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
        return []
    values = [value for _, value in ast.iter_fields(node)]
    return [
        name for value in values for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)
    ]


def _check_attribute(name: str, owner: ast.AST | None) -> None:
    if leads_out(name) or name in CLOCK | DANGLING:
        raise Refused(f"attribute {name}")
    # format fields may read attributes, out of sight of this check unless the template is in plain sight
    if name == "format" and not (isinstance(owner, ast.Constant) and _plain_template(owner.value)):
        raise Refused("str.format with attributes or with a computed template")


def leads_out(name: str) -> bool:
    """Whether an attribute of this name may lead from a snippet's own values to the interpreter's."""
    return (
        (name.startswith("_") and name not in UNDERSCORED)
        or name in INTROSPECTION
        or name.startswith(INTROSPECTION_PREFIXES)
    )


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


def safe_modules(report: Callable[..., NoReturn]) -> dict[str, types.ModuleType]:
    """Stand-ins for the modules of ``MODULES`` by name. The real modules hold references to ``sys`` and ``os``.

    ``report`` ends a snippet with a reason.
    """
    offered = {}
    for name, chosen in MODULES.items():
        real = import_module(name)
        stand_in = types.ModuleType(name)
        names = getattr(real, "__all__", dir(real)) if chosen is None else chosen
        for attribute in names:
            value = getattr(real, attribute, None)
            if not attribute.startswith("_") and not isinstance(value, types.ModuleType):
                setattr(stand_in, attribute, value)
        offered[name] = stand_in
    _offer_random(offered["random"])
    vars(offered["functools"])["cached_property"] = cached_property
    vars(offered["dataclasses"])["dataclass"] = checked_dataclass(report)
    return offered


def cached_property(compute: Callable[[Any], Any]) -> property:
    """``functools.cached_property`` for a snippet.

    Python's stores the value in the object under a name that a snippet can change. With a name of Python's own, such as
    ``__del__`` or ``__reduce_ex__``, the library would then call functions of the snippet's and set any attribute.
    """
    kept: dict[int, tuple[Any, Any]] = {}  # the object is kept too, so that no other one gets its number

    def get(owner):
        if id(owner) not in kept:
            kept[id(owner)] = (owner, compute(owner))
        return kept[id(owner)][1]

    def put(owner, value):
        kept[id(owner)] = (owner, value)

    def forget(owner):
        if kept.pop(id(owner), None) is None:
            raise AttributeError("this cached property has no value yet")

    return property(get, put, forget)


class _SeededBase(random.Random):
    """What ``super()`` gives a snippet that looks for the generator behind :class:`SeededRandom`. It is the same one."""

    def seed(self, a=None, version=2):
        """As ``random.Random.seed``, but None means 0."""
        super().seed(0 if a is None else a, version)


class SeededRandom(_SeededBase):
    """A generator of random numbers that starts at 0 where Python's takes its seed from the machine."""


def _offer_random(stand_in: types.ModuleType) -> None:
    """Give the stand-in for ``random`` the methods of one seeded generator, as Python's module has those of its own."""
    generator = SeededRandom()
    for name in random.__all__:
        if name not in ("Random", "SystemRandom"):
            setattr(stand_in, name, getattr(generator, name))
    vars(stand_in)["Random"] = SeededRandom


def checked_dataclass(report: Callable[..., NoReturn]) -> Callable[..., Any]:
    """``dataclasses.dataclass`` for a snippet: ``report`` ends the snippet if a field has a name that leads out.

    The methods that a data class gets read and set the fields of whatever they are given. :func:`check_tree` cannot see
    all names of fields, because ``NamedTuple`` takes them as texts. Python writes the methods as source text, with the
    names in it, so a name is exactly a text: a class derived from ``str`` could be any source. It is judged as the
    parser will read it, which takes a full-width letter for the plain one. A class without a docstring gets one, because
    Python would write it from the signature of a base class, and evaluates the attributes that the base class's own
    docstring names there.
    """

    def dataclass(cls=None, /, **options):
        if cls is None:
            return lambda decorated: dataclass(decorated, **options)
        if not isinstance(cls, type):
            raise TypeError("dataclass() decorates a class")
        # before the class is made: making it may call methods of the snippet's
        names = inspect.get_annotations(cls)
        if any(type(name) is not str or leads_out(normalize("NFKC", name)) for name in names):
            report("forbidden")
        cls.__doc__ = cls.__doc__ or cls.__name__
        return dataclasses.dataclass(cls, **options)

    return dataclass


def _is_hashed_by_value(value: Any) -> bool:
    """Whether ``hash(value)`` depends on what the value is, and not on where it lies."""
    if type(value) in (tuple, frozenset):
        return all(_is_hashed_by_value(item) for item in value)
    plain = (bool, bytes, complex, float, int, str, Decimal, Fraction, date, datetime, time, timedelta)
    return type(value) in plain or isinstance(type(value).__hash__, types.FunctionType)


def safe_builtins(
    report: Callable[..., NoReturn], offered: dict[str, types.ModuleType], output: int, said: list[str]
) -> dict[str, Any]:
    """The builtins of a snippet: the harmless ones, exceptions, and for every other a function that ends the snippet.

    ``report`` ends it with a reason. ``offered`` are the modules it may import. It may print ``output``
    characters, the first of which are added to ``said``.
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
        sep, end = " " if sep is None else sep, "\n" if end is None else end
        # a joined text is a plain one, whatever classes of texts the snippet has made
        text = "".join((str.join(sep, [str(value) for value in values]), end, ""))
        if printed < SAID_BYTES:
            said.append(text[:SAID_BYTES])
        printed += len(text) + 1
        if printed > output:
            report("output")

    def kind(value, *rest):
        # with the class of a class, a snippet could make classes with any attributes
        if rest or isinstance(value, type):
            report("forbidden")
        return type(value)

    def hashed(value):
        if not _is_hashed_by_value(value):  # Python's number for it is its address, which changes from run to run
            report("forbidden")
        return hash(value)

    allowed: dict[str, Any] = {"__import__": load, "print": show, "type": kind, "hash": hashed}
    for name, value in vars(builtins).items():
        if name in BUILTINS or (isinstance(value, type) and issubclass(value, BaseException)):
            allowed[name] = value
        elif not name.startswith("_"):
            allowed.setdefault(name, refuse)
    return allowed
