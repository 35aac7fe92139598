"""Untrusted JSON schemas, checked in bounded time. Imports no torch.

A schema comes with a tool, often from another project's server. The package ``jsonschema`` checks what it says, and
this bounds what that may cost: a pattern that never ends, alternatives of alternatives, lists compared pair by pair,
references that go in a circle. A schema that cannot be right is named before anybody calls the tool.
"""

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any
from urllib.parse import quote

import regex
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from maporl.errors import ConfigError
from trl_ext.errors import retold

MOST_STEPS = 100_000
"""Most keywords of a schema that one check looks at."""
SECONDS = 2.0
"""Most seconds of a check."""
PATTERN_SECONDS = 0.5
"""Most seconds of one search for a pattern."""
MOST_PARTS = 20_000
"""Most parts of a schema."""
LONGEST_PATTERN = 2000
"""Most characters of a pattern."""
MOST_REPEATS = 10_000
"""The largest number in braces of a pattern. The package ``regex`` does not look at its clock inside of larger ones."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_PARTS = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
_SAME_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
"""Keywords whose schemas look at the value itself, and not at a part of it."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class TooMuch(Exception):
    """A check needs more steps or time than any check should."""


class _Spent(threading.local):
    steps = 0
    deadline = 0.0


_spent = _Spent()


class BoundedSchema:
    """A JSON schema that can be checked in bounded time.

    ``unevaluatedItems`` and ``unevaluatedProperties`` are not looked at, and ``nullable: true``, which OpenAPI and
    transformers write, allows null. Patterns are those of ECMA, as JSON schema says: ``$`` is the end of the text,
    ``\\d`` is a digit of ASCII. Without a ``$schema``, ``exclusiveMinimum: true`` and lists of ``items`` are read as
    older drafts have them.

    Args:
        schema: the schema.

    Raises:
        ConfigError: it is not valid, refers to what it does not have or to itself without end, has a pattern that
            cannot be read, or is too large. The message begins with the place in it.
    """

    def __init__(self, schema: dict[str, Any]):
        if not isinstance(schema.get("$schema", ""), str):
            raise _fault(("$schema",), f"expected the name of a draft, got {schema['$schema']!r:.80}")
        kind = validator_for(schema)
        bounded = _bounded(kind)
        try:
            plain = _Copy(older="$schema" not in schema).schema(schema, ())
            _begin()
            error = best_match(islice(bounded(kind.META_SCHEMA).iter_errors(plain), 50))
            if error is not None:
                raise _fault(tuple(error.absolute_path), error.message[:200])
            _check_references(plain, kind.META_SCHEMA.get("$schema", ""))
        except RecursionError:
            raise ConfigError("parameters: it is nested too deep; give a flatter JSON schema") from None
        except TooMuch as error:
            raise ConfigError(f"parameters: {error}; give a smaller JSON schema") from None
        self.schema: dict[str, Any] = plain
        """The schema as it is checked: with null among the types of what is ``nullable``, and references that begin
        with #/."""
        # without a registry a reference to another address would be fetched
        self._validator: Any = bounded(plain, registry=Registry())

    def begin(self) -> None:
        """Begin a check. All steps up to the next one are counted together."""
        _begin()

    def step(self) -> None:
        """Count a step of the caller's own.

        Raises:
            TooMuch: there were too many since :meth:`begin`.
        """
        _count()

    def error(self, value: Any, part: Any = None) -> ValidationError | None:
        """Return what is wrong with a value by the schema, or by a ``part`` of it, or None.

        Raises:
            TooMuch: this cannot be said in bounded time.
        """
        validator = self._validator if part is None else self._validator.evolve(schema=part)
        with retold(RecursionError, lambda _: TooMuch("it is nested too deep to be checked")):
            return best_match(islice(validator.iter_errors(value), 50))


def _begin() -> None:
    _spent.steps, _spent.deadline = 0, time.monotonic() + SECONDS


def _count() -> None:
    _spent.steps += 1
    if _spent.steps > MOST_STEPS or (_spent.steps % 64 == 0 and time.monotonic() > _spent.deadline):
        raise TooMuch("it takes too long to be checked")


def _fault(where: tuple[Any, ...], what: str) -> ConfigError:
    return ConfigError(f"{'.'.join(['parameters', *map(str, where)])[:200]}: {what}; give a valid JSON schema")


class _Copy:
    """Copies schemas for the checker, and checks their patterns. References of theirs stay as they are."""

    # ``older``: no draft is named, so what older drafts wrote otherwise is written as the newest one has it

    def __init__(self, older: bool) -> None:
        self.parts, self.older = 0, older

    def schema(self, schema: Any, where: tuple[Any, ...]) -> Any:
        """Return the schema as it is checked: without ``$schema``, which would choose another checker, and with null
        among the types where it is ``nullable``."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise ConfigError(f"parameters: it has more than {MOST_PARTS} parts; give a smaller JSON schema")
        if not isinstance(schema, dict):
            return schema
        made = {key: self._value(key, value, (*where, key)) for key, value in schema.items() if key != "$schema"}
        if self.older:
            _renew(made)
        if schema.get("nullable") is True:
            kinds = made.get("type")
            if isinstance(kinds, str | list):
                made["type"] = list(dict.fromkeys([*([kinds] if isinstance(kinds, str) else kinds), "null"]))
            if isinstance(made.get("enum"), list) and None not in made["enum"]:
                made["enum"] = [*made["enum"], None]
        return made

    def _value(self, key: str, value: Any, where: tuple[Any, ...]) -> Any:
        if key in _MAPS and isinstance(value, dict):
            if key == "patternProperties":
                for pattern in value:
                    _check_pattern(pattern, (*where[:-1], key))
            return {name: self.schema(part, (*where, name)) for name, part in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.schema(part, (*where, number)) for number, part in enumerate(value)]
        if key in _PARTS:
            return self.schema(value, where)
        if key == "pattern" and isinstance(value, str):
            _check_pattern(value, where)
        # a reference may lead anywhere, such as to #/components/schemas/Place
        return self.schema(value, where) if isinstance(value, dict) and key not in ("const", "default") else value


def _renew(made: dict[str, Any]) -> None:
    """Write the keywords of a schema as the newest draft has them."""
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if made.get(exclusive) is False:
            del made[exclusive]
        elif made.get(exclusive) is True and inclusive in made:
            made[exclusive] = made.pop(inclusive)
    if isinstance(made.get("items"), list) and "prefixItems" not in made:
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made.pop("additionalItems")
        if not made["prefixItems"]:
            del made["prefixItems"]


def _check_pattern(pattern: str, where: tuple[Any, ...]) -> None:
    """Check that a pattern can be read, and that searching for it ends."""
    if len(pattern) > LONGEST_PATTERN:
        raise _fault(where, f"a pattern of {len(pattern)} characters; at most {LONGEST_PATTERN} are read")
    read = _ecma(pattern)
    if _repeats(read) > MOST_REPEATS:
        raise _fault(where, f"the pattern {pattern!r:.80} repeats something more than {MOST_REPEATS} times")
    try:
        regex.compile(read)
    except (regex.error, RecursionError, OverflowError) as error:
        raise _fault(where, f"{pattern!r:.80} is not a regular expression: {str(error)[:120]}") from None


_CLASSES = {
    "d": "0-9",
    "D": r"\x00-\x2f\x3a-\U0010ffff",
    "w": "A-Za-z0-9_",
    "W": r"\x00-\x2f\x3a-\x40\x5b-\x5e\x60\x7b-\U0010ffff",
}
_ECMA = re.compile(
    r"\\c(?P<control>[A-Za-z])|\\u\{(?P<code>[0-9A-Fa-f]{1,6})\}|\\k<(?P<group>\w+)>|\\(?P<set>[dDwW])|\\.|(?P<any>\[\^\])"
    r"|(?P<none>\[\])|(?P<open>\[\^?)|(?P<close>\])|(?P<end>\$)",
    re.DOTALL,
)
"""What of a pattern ECMA reads otherwise than the package ``regex``."""


@functools.lru_cache(maxsize=1024)
def _ecma(pattern: str) -> str:
    """Return a pattern of ECMA as the package ``regex`` has to be given it."""
    inside = False

    def meant(match: re.Match[str]) -> str:
        nonlocal inside
        kind, words = match.lastgroup, match[0]
        if kind == "control":
            return f"\\x{ord(match['control']) % 32:02x}"
        if kind == "code" and int(match["code"], 16) <= 0x10FFFF:
            return f"\\U{int(match['code'], 16):08x}"
        if kind == "set":
            return _CLASSES[match["set"]] if inside else f"[{_CLASSES[match['set']]}]"
        if not inside and kind in ("any", "none", "end"):
            return {"any": r"[\s\S]", "none": "(?!)", "end": r"\Z"}[kind]
        if not inside and kind == "group":
            return f"(?P={match['group']})"
        inside = kind == "open" or (inside and kind not in ("close", "any", "none"))  # in a set, [ is a character
        return words

    return _ECMA.sub(meant, pattern)


def _repeats(pattern: str) -> int:
    """Return how often a pattern's counts in braces repeat something at most; those of nested groups multiply."""
    inside, largest = [1], 1
    for match in _BRACED.finditer(pattern):
        words = match[0]
        if words == "(":
            inside.append(1)
        elif words.startswith(")"):
            inner = inside.pop() if len(inside) > 1 else 1
            inside[-1] = max(inside[-1], inner * int(match["group"] or 1))
        elif match["one"]:
            inside[-1] = max(inside[-1], int(match["one"]))
        largest = max(largest, *inside)
    return largest


_BRACED = re.compile(
    r"\\(?:.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(|\)(?:\{(?:\d*,)?(?P<group>\d+)?,?\})?|\{(?:\d*,)?(?P<one>\d+),?\}",
    re.DOTALL,
)
"""What of a pattern counts: escapes and sets, which are passed over, groups, and numbers in braces."""


def _check_references(schema: dict[str, Any], dialect: str) -> None:
    """Check that every reference leads somewhere inside of ``schema``, and that none comes back to its own value."""
    resource = Resource.from_contents(schema, specification_with(dialect))
    walk = _Walk()
    walk.visit(schema, Registry().with_resource(resource.id() or "", resource).resolver(resource.id() or ""), ())
    walk.check_circles()
    walk.point(schema)


class _Walk:
    """Follows the references of a schema."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        self.references: list[tuple[dict[str, Any], Any]] = []
        self.same: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
        """Which schemas each one applies to the same value, and not to a part of it, and where it says so."""

    def visit(self, schema: Any, resolver: Any, where: tuple[Any, ...]) -> None:
        """Look at one schema and at all in it and behind its references."""
        if not isinstance(schema, dict) or id(schema) in self.seen:
            return
        self.seen[id(schema)], same = schema, self.same.setdefault(id(schema), [])
        for key, value in schema.items():
            parts: list[tuple[Any, tuple[Any, ...]]] = []
            if key in _REFERENCES and isinstance(value, str):
                try:
                    target = resolver.lookup(value)
                except (Unresolvable, ValueError, LookupError, TypeError, AttributeError):
                    raise _fault((*where, key), f"{value!r:.80} is not in the schema") from None
                if key == "$ref":
                    self.references.append((schema, target.contents))
                if key == "$ref" and isinstance(target.contents, dict):
                    same.append((id(target.contents), (*where, key)))
                self.visit(target.contents, target.resolver, (*where, key))
            elif key in _MAPS and isinstance(value, dict):
                parts = [(part, (*where, key, name)) for name, part in value.items()]
            elif key in _LISTS and isinstance(value, list):
                parts = [(part, (*where, key, number)) for number, part in enumerate(value)]
            elif key in _PARTS:
                parts = [(value, (*where, key))]
            for part, place in parts:
                if key in _SAME_PLACE and isinstance(part, dict):
                    same.append((id(part), place))
                self.visit(part, resolver, place)

    def point(self, root: dict[str, Any]) -> None:
        """Make every ``$ref`` begin with ``#/``, whatever anchor or ``$id`` it named, so that all who follow it need no
        others."""
        places = {id(root): "#"}
        waiting: list[Any] = [root]
        while waiting:
            one = waiting.pop()
            for key, part in one.items() if isinstance(one, dict) else enumerate(one):
                if isinstance(part, dict | list) and id(part) not in places:
                    name = quote(str(key).replace("~", "~0").replace("/", "~1"), safe="$")
                    places[id(part)] = f"{places[id(one)]}/{name}"
                    waiting.append(part)
        if all(id(target) in places for _, target in self.references):
            for schema, target in self.references:
                schema["$ref"] = places[id(target)]
            for schema in self.seen.values():
                for key in ("$id", "id"):
                    if isinstance(schema.get(key), str):
                        del schema[key]

    def check_circles(self) -> None:
        """Check that no schema comes back to itself with the same value, which would never end."""
        done: set[int] = set()

        def follow(schema: int, path: frozenset[int]) -> None:
            for other, where in self.same.get(schema, ()):
                if other in path:
                    raise _fault(where, "it refers to itself without end")
                if other not in done:
                    follow(other, path | {other})
            done.add(schema)

        for schema in self.same:
            if schema not in done:
                follow(schema, frozenset({schema}))


_KINDS: dict[Any, Any] = {}


def _bounded(kind: Any) -> Any:
    """Return a class of ``jsonschema`` whose checks are counted."""
    if kind not in _KINDS:
        checks = {
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
            "uniqueItems": _unique_items,
            "multipleOf": _multiple_of,
        }
        keywords = {name: checks.get(name, check) for name, check in kind.VALIDATORS.items()}
        keywords |= dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _nothing)
        _KINDS[kind] = extend(kind, {name: _counted(check) for name, check in keywords.items()})
    return _KINDS[kind]


Check = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


def _counted(check: Check) -> Check:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _count()
        return check(validator, value, instance, schema)

    return counted


def _nothing(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    return None


def _found(pattern: str, text: str) -> bool:
    if time.monotonic() > _spent.deadline:
        raise TooMuch("it takes too long to be checked")
    with retold(TimeoutError, lambda _: TooMuch(f"the pattern {pattern!r:.80} takes too long to be looked for in it")):
        return regex.search(_ecma(pattern), text, timeout=PATTERN_SECONDS, concurrent=True) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _found(pattern, instance):
        yield ValidationError(f"{instance!r:.120} does not match {pattern!r:.200}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others = [name for name in instance if name not in properties and not any(_found(one, name) for one in patterns)]
    if isinstance(part, dict):
        for name in others:
            yield from validator.descend(instance[name], part, path=name)
    elif part is False and others:
        yield ValidationError(f"unknown {', '.join(others)[:80]}; it takes {', '.join(properties) or 'nothing'}")


def _unique_items(validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if unique is True and isinstance(instance, list):
        seen: set[str] = set()
        for one in instance:
            key = json.dumps(_same(one), sort_keys=True)
            if key in seen:
                yield ValidationError(f"{one!r:.80} stands in it more than once")
                return
            seen.add(key)


def _same(value: Any) -> Any:
    """Return ``value`` so that equal numbers are written alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_same(part) for part in value]
    return {key: _same(part) for key, part in value.items()} if isinstance(value, dict) else value


def _multiple_of(validator: Any, by: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    number = isinstance(instance, int | float) and not isinstance(instance, bool)
    # as they are written: 0.3 is three times 0.1, which it is not in binary
    if number and (Fraction(str(instance)) / Fraction(str(by))).denominator != 1:
        yield ValidationError(f"{instance!r:.80} is not a multiple of {by}")
