"""Read untrusted YAML in bounded time and memory, and write YAML. Imports no torch.

YAML lets a few hundred bytes stand for gigabytes (aliases of aliases) and nests without end, and Python refuses or
crawls over integers of thousands of digits. Configurations come from the hub and from other people's folders, so every
YAML text of this package is read here.

A bare word is what the core rules of YAML 1.2 say, where people expect them: ``1e-5`` is a number, and ``12:30:45``,
``2024-01-31`` and ``=`` are texts. Two things differ. ``0123`` is a text, which becomes the number 123 where a number
is expected and keeps its zero in an alphabet. ``yes``, ``no``, ``on`` and ``off`` and numbers such as ``1_000`` mean
what they meant in YAML 1.1, because configurations use them.
"""

import copy
import re
from collections.abc import Hashable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from maporl.text import encoding_of
from trl_ext.errors import retold

MOST_BYTES = 2**20
MOST_NODES = 50_000
"""Most values of a text, where each alias counts as many as it stands for. The longest configuration here has 200."""
DEEPEST = 50
LONGEST_NUMBER = 400
"""Most characters of a number.

Integers to base 60, which the tag ``!!int`` allows, would otherwise take quadratic time.
"""
LARGEST = 2**63
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")


def parse_yaml(text: str, name: str = "the text") -> Any:
    """Return the plain values of a YAML text. ``name`` is the text's name in errors.

    Raises:
        yaml.YAMLError: the text is not YAML, has a key twice, holds anything but plain values, or is too large, too
            deep, or too large when its aliases are expanded.
    """
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"{len(text)} characters; expected at most {MOST_BYTES}")
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.YAMLError:
        raise
    except Exception as error:  # for a date or a number that does not exist, the library raises several kinds
        raise yaml.YAMLError(f"{name}: {error}") from None
    finally:
        loader.dispose()


def parse_value(text: str) -> Any:
    """Return the plain value of a YAML text of a command line.

    A command line has no comments, so ``#`` is a character like any other. Words that end in a colon are a text there,
    and not a key without a value.

    >>> parse_value("runs/try #2"), parse_value("Answer #1:"), parse_value("{a: '#'}"), parse_value("1e-4")
    ('runs/try #2', 'Answer #1:', {'a': '#'}, 0.0001)

    Raises:
        yaml.YAMLError: as for :func:`parse_yaml`.
    """
    # the library knows comments by this character alone
    stands_for = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    with retold(yaml.YAMLError, lambda error: yaml.YAMLError(str(error).replace(stands_for, "#"))):
        value = parse_yaml(text.replace("#", stands_for))
    if isinstance(value, dict) and list(value.values()) == [None] and text.strip().endswith(":"):
        return text.strip()
    return _replaced(value, stands_for, "#")


def _replaced(value: Any, old: str, new: str) -> Any:
    """Return plain values with ``new`` in the place of ``old`` in all their texts."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {_replaced(key, old, new): _replaced(inner, old, new) for key, inner in value.items()}
    return [_replaced(inner, old, new) for inner in value] if isinstance(value, list) else value


def dump_yaml(values: Any) -> str:
    """Return the YAML text of plain values. :func:`parse_yaml` reads the same values from it."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml_file(path: Path) -> Any:
    """Return the plain values of a YAML file, of which at most one byte more than :data:`MOST_BYTES` is read.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is neither UTF-8 nor what its byte-order mark says.
        yaml.YAMLError: it is too large, or as for :func:`parse_yaml`.
    """
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise yaml.YAMLError(f"more than {MOST_BYTES} bytes; a configuration has a few thousand")
    return copy.deepcopy(_parsed(content.decode(encoding_of(content)), str(path)))


_parsed = lru_cache(maxsize=256)(parse_yaml)  # recipes extend each other, and each is read many times


_refusal = partial(yaml.constructor.ConstructorError, None, None)
"""The error of a place in a file: what is wrong, and its mark."""


class _Loader(yaml.SafeLoader):
    """Counts what it composes, before anything is built of it."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self.nodes = self.depth = 0
        self.sizes: dict[int, int] = {}  # by the id of a node: the nodes in it, aliases expanded

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self.sizes:
                raise _refusal("an alias stands inside its own anchor", mark)
            self.nodes += self.sizes[id(node)]
        else:
            before = self.nodes
            self.nodes += 1
            self.depth += 1
            if self.depth > DEEPEST:
                raise _refusal(f"nested more than {DEEPEST} deep", mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            self.sizes[id(node)] = self.nodes - before
        if self.nodes > MOST_NODES:
            raise _refusal(f"more than {MOST_NODES} values, where an alias counts as what it stands for", mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN:
            raise _refusal(f"the tag {node.tag!r:.60} is not a plain value", node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _refusal("a key is a list or a mapping", key_node.start_mark)
            if key in seen:
                raise _refusal(f"the key {key!r:.80} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        """The number of a scalar.

        Raises:
            yaml.YAMLError: it has too many digits.
        """
        whole = node.tag.endswith(":int")
        if len(node.value) <= LONGEST_NUMBER:
            number = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
            if not whole or -LARGEST <= number < LARGEST:
                return number
        raise _refusal(
            f"a number of {len(node.value)} characters, {node.value[:20]}...; at most 63 bits are read", node.start_mark
        )


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or this reader would take for anything but a text."""


_NUMBERS = {
    "int": (r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
"""What a bare word that is a number looks like, and the characters with which it begins."""
_OTHER_RULES = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp", "value", "merge")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in rules if tag not in _OTHER_RULES]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_form, _first) in _NUMBERS.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_form})$"), list(_first))
