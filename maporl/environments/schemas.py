"""JSON schemas of strangers, checked in bounded time. Imports no torch.

A schema comes with a tool, often from a server of somebody else. The package ``jsonschema_rs`` checks what it says. It
cannot be interrupted, so what a check may cost is counted before it is made: alternatives of alternatives, references
that go in a circle, patterns over long texts. A schema that cannot be right is named before anybody calls the tool.
"""

import functools
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urljoin

import jsonschema_rs

from maporl.errors import ConfigError
from trl_ext.chat.template_worker import PARTED, VALUES
from trl_ext.chat.written_calls import referred
from trl_ext.errors import retold

MOST_STEPS = 100_000
"""Most steps of a check: keywords, each with 256 characters of the value that it looks at."""
SECONDS = 2.0
"""Most seconds after :meth:`BoundedSchema.begin` at which a step may be made. One step has its end by its size."""
MOST_PARTS = 20_000
"""Most parts of a schema. A pattern counts as many as it has units of 16 KiB when it is compiled."""
LONGEST_PATTERN = 2000
"""Most characters of a pattern."""
_UNIT, _UNITS = 2**14, 2**10
_REFERENCES = ("$recursiveRef", "$dynamicRef", "$ref")
"""Keywords that name another schema. The last one counts, and names what it names where it is written."""
_HERE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Keywords whose schemas look at the value itself, and not at a part of it."""
_LEFT_OUT = ("$schema", "unevaluatedItems", "unevaluatedProperties", "contentEncoding", "contentMediaType")
_DRAFTS = {"draft-03": "4", "draft-04": "4", "draft-06": "6", "draft-07": "7", "2019-09": "201909", "": "202012"}


class TooMuch(Exception):
    """A check needs more steps or time than any check should."""


class _Spent(threading.local):
    steps = 0
    deadline = 0.0


_spent = _Spent()


class BoundedSchema:
    """A JSON schema that can be checked in bounded time.

    ``unevaluatedItems``, ``unevaluatedProperties`` and how texts are encoded are not looked at, and ``nullable: true``,
    which OpenAPI and transformers write, allows null. Patterns are those of ECMA that can be searched for in linear
    time: ``$`` is the end of the text, ``\\d`` is a digit of ASCII, and nothing looks ahead or back. Without a
    ``$schema``, ``exclusiveMinimum: true`` and lists of ``items`` are read as older drafts have them; draft 3 is read
    as draft 4, with ``required: true`` of a property.

    Args:
        schema: the schema.

    Raises:
        ConfigError: it is not valid, refers to what it does not have or to itself without end, has a pattern that
            cannot be read, or is too large. The message begins with the place in it.
    """

    def __init__(self, schema: dict[str, Any]):
        named = schema.get("$schema", "")
        if not isinstance(named, str):
            raise _fault(("$schema",), f"expected the name of a draft, got {named!r:.80}")
        reader, draft = _Reader(named), next(draft for words, draft in _DRAFTS.items() if words in named)
        try:
            text = json.dumps(schema, ensure_ascii=False, skipkeys=True, default=str).encode(errors="replace")
            self.schema: dict[str, Any] = reader.schema(json.loads(text), (), "")
            """The schema as it is checked: with null among the types of what is ``nullable``, and references that begin
            with #/."""
            reader.refer(self.schema)
            schemas = jsonschema_rs.Registry([("urn:schema", self.schema)], getattr(jsonschema_rs, f"Draft{draft}"))
            options: dict[str, Any] = {"registry": schemas, "offline": True, "validate_formats": False}
            options["pattern_options"] = jsonschema_rs.RegexOptions(size_limit=_UNIT * _UNITS)
            kind = getattr(jsonschema_rs, f"Draft{draft}Validator")
            self._validator = kind(self.schema, **options)
        except ConfigError:
            raise
        except jsonschema_rs.ValidationError as error:
            raise _fault(error.instance_path, _short(_best([error]).message)) from None
        except (RecursionError, ValueError) as error:
            raise ConfigError(
                f"parameters: it is nested too deep or no JSON: {error}; give a flatter JSON schema"
            ) from None
        self._places = reader.places
        self._part = functools.cache(lambda place: kind({"$ref": f"urn:schema{place}"}, **options))

    def begin(self) -> None:
        """Begin a check. All steps up to the next one are counted together."""
        _spent.steps, _spent.deadline = 0, time.monotonic() + SECONDS

    def step(self, steps: int = 1) -> None:
        """Count steps of a check, such as the caller's own.

        Raises:
            TooMuch: there were too many since :meth:`begin`.
        """
        _spent.steps += steps
        if _spent.steps > MOST_STEPS or time.monotonic() > _spent.deadline:
            raise TooMuch("it takes too long to be checked")

    def error(self, value: Any) -> str | None:
        """Return where a value is wrong by the schema, and what is wrong there, or None.

        Raises:
            TooMuch: this cannot be said in bounded time.
        """
        with _bounded():
            self._count(self.schema, value, {})
            errors = list(self._validator.iter_errors(value))
        if not errors:
            return None
        error = _best(errors)
        where, what = ".".join(map(str, error.instance_path)), error.message
        if error.kind.name == "additionalProperties":
            takes = referred("#" + _pointer(error.schema_path[:-1]), self.schema).get("properties", ())
            what = f"unknown {', '.join(error.kind.unexpected)[:80]}; it takes {', '.join(takes) or 'nothing'}"
        return f"{where + ': ' if where else ''}{_short(' '.join(what.split()))}"

    def fits(self, value: Any, part: Any) -> bool:
        """Return whether a value is right by a ``part`` of :attr:`schema`.

        Raises:
            TooMuch: this cannot be said in bounded time.
        """
        if not isinstance(part, dict):
            return part is not False
        with _bounded():
            self._count(part, value, {})
            return bool(self._part(self._places[id(part)]).is_valid(value))

    def _count(self, schema: Any, value: Any, sizes: dict[int, int]) -> None:
        """Count at least as many steps as checking takes, whatever of the schema is looked at."""
        if not isinstance(schema, dict):
            return
        if id(value) not in sizes:
            sizes[id(value)] = len(repr(value))
        listed = sum(len(one) for one in schema.values() if isinstance(one, list))
        self.step((1 + len(schema) + listed // 16) * (1 + sizes[id(value)] // 256))
        for _, part in _here(schema, self.schema):
            self._count(part, value, sizes)
        if isinstance(value, str) and "pattern" in schema:
            self.step(_cost(schema["pattern"], value))
        if isinstance(value, dict):
            properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
            for name, one in value.items():
                self._count(schema.get("propertyNames"), name, sizes)
                self._count(properties.get(name, schema.get("additionalProperties")), one, sizes)
                for pattern, part in patterns.items():
                    self.step(_cost(pattern, name))
                    self._count(part, one, sizes)
        elif isinstance(value, list):
            prefix, rest = prefixed(schema)
            for number, one in enumerate(value):
                self._count(prefix[number] if number < len(prefix) else rest, one, sizes)
                self._count(schema.get("contains"), one, sizes)


def prefixed(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of the first items of a list by ``schema``, and that of all others."""
    items = schema.get("items")
    return (items, schema.get("additionalItems")) if isinstance(items, list) else (schema.get("prefixItems", []), items)


def _bounded() -> Any:
    return retold((RecursionError, ValueError), lambda error: TooMuch(f"it cannot be checked: {error}"))


def _best(errors: list[Any]) -> Any:
    """Return the error that tells most: one of the whole first, and of its alternatives that which goes deepest."""

    def depth(error: Any) -> tuple[int, bool]:
        return len(error.instance_path), error.kind.name != "type"

    best = min(errors, key=depth)
    while ways := sorted((one for way in getattr(best.kind, "context", ()) for one in way), key=depth, reverse=True):
        if len(ways) > 1 and depth(ways[0]) == depth(ways[1]):
            break
        best = ways[0]
    return best


def _short(words: str) -> str:
    """Return a message without the midst of a long value, so that what was expected is seen."""
    return words if len(words) <= 200 else f"{words[:120]} ... {words[-75:]}"


def _fault(where: Iterable[Any], what: str) -> ConfigError:
    return ConfigError(f"{'.'.join(['parameters', *map(str, where)])[:200]}: {what}; give a valid JSON schema")


def _pointer(where: Iterable[Any]) -> str:
    return "".join("/" + quote(str(key).replace("~", "~0").replace("/", "~1"), safe="$") for key in where)


def _here(schema: dict[str, Any], root: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Give the schemas that ``schema`` applies to the same value, each with where it says so."""
    for key in _HERE:
        value = schema.get(key)
        parts: Iterable[Any] = [((key,), referred(value, root) if isinstance(value, str) else value)]
        if isinstance(value, list):
            parts = [((key, number), part) for number, part in enumerate(value)]
        elif isinstance(value, dict) and key in PARTED:
            parts = [((key, name), part) for name, part in value.items()]
        yield from (one for one in parts if isinstance(one[1], dict))


class _Reader:
    """Copies a schema for the checker."""

    def __init__(self, named: str) -> None:
        self.named, self.parts = named, 0
        self.id = "id" if "draft-03" in named or "draft-04" in named else "$id"
        self.made: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self.places: dict[int, str] = {}
        """The reference to each schema of the copy."""
        self.names = {"": "#"}
        """The reference to each schema that has an address or an anchor."""
        self.references: list[tuple[dict[str, Any], tuple[Any, ...], str]] = []

    def schema(self, schema: Any, where: tuple[Any, ...], base: str) -> Any:
        """Return a schema as it is checked: without what would choose another checker or address, and with null among
        the types where it is ``nullable``. References to ``base`` are found in it."""
        self._add(1)
        if len(where) > 200:
            raise RecursionError("its parts lie more than 200 keys inside each other")
        if not isinstance(schema, dict):
            return schema
        schema = self._renewed(schema)
        place = "#" + _pointer(where)
        address, left_out = schema.get(self.id), list(_LEFT_OUT)
        if isinstance(address, str):
            base, left_out = urljoin(base, address.removesuffix("#")), [*left_out, self.id]
            self.names[base] = place
            base = base.partition("#")[0]
        for anchor in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(anchor), str):
                self.names[f"{base}#{schema[anchor]}"], left_out = place, [*left_out, anchor]
        made = {key: self._value(key, one, (*where, key), base) for key, one in schema.items() if key not in left_out}
        if schema.get("nullable") is True:
            kinds = made.get("type")
            if isinstance(kinds, str | list):
                made["type"] = list(dict.fromkeys([*([kinds] if isinstance(kinds, str) else kinds), "null"]))
            if isinstance(made.get("enum"), list) and None not in made["enum"]:
                made["enum"] = [*made["enum"], None]
        self.places[id(made)] = place
        self.made.append((made, where))
        if any(isinstance(made.get(key), str) for key in _REFERENCES):
            self.references.append((made, where, base))
        return made

    def _add(self, parts: int) -> None:
        self.parts += parts
        if self.parts > MOST_PARTS:
            raise ConfigError(f"parameters: it has more than {MOST_PARTS} parts; give a smaller JSON schema")

    def _value(self, key: str, value: Any, where: tuple[Any, ...], base: str) -> Any:
        if key in PARTED and isinstance(value, dict):
            parts = {name: self.schema(part, (*where, name), base) for name, part in value.items()}
            return {self._pattern(one, where): parts[one] for one in parts} if key == "patternProperties" else parts
        if key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            return [self.schema(part, (*where, number), base) for number, part in enumerate(value)]
        if key == "pattern" and isinstance(value, str):
            return self._pattern(value, where)
        # a reference may lead anywhere, such as to #/components/schemas/Place
        return self.schema(value, where, base) if isinstance(value, dict) and key not in VALUES else value

    def _renewed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with the keywords that it has in the draft that checks it."""
        made = dict(schema)
        if "draft-03" in self.named:
            made.pop("required", None)
            parts = made["properties"].items() if isinstance(made.get("properties"), dict) else ()
            if needed := [name for name, part in parts if isinstance(part, dict) and part.get("required") is True]:
                made["required"] = needed
        if self.named:
            return made
        for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and inclusive in made:
                made[exclusive] = made.pop(inclusive)
        if isinstance(made.get("items"), list):
            first, rest = made.pop("items"), made.pop("additionalItems", True)
            made |= {"prefixItems": first, "items": rest} if first else {"items": rest}
        return made

    def _pattern(self, pattern: str, where: tuple[Any, ...]) -> str:
        """Return a pattern as the checker reads it."""
        if len(pattern) > LONGEST_PATTERN:
            raise _fault(where, f"a pattern of {len(pattern)} characters; at most {LONGEST_PATTERN} are read")
        read = _SETS.sub(lambda found: {"[]": r"[^\s\S]", "[^]": r"[\s\S]"}.get(found[0], found[0]), pattern)
        if units := _units(read):
            self._add(units)
            return read
        if _units(re.sub(r"\{\d+,?\d*\}", "", read)):
            raise _fault(where, f"the pattern {pattern!r:.80} repeats something too often to be searched for")
        back = re.search(r"\(\?<?[=!]|\\[1-9k]", pattern)
        why = f"{back[0]} looks around or back, which takes too long" if back else "it cannot be read"
        raise _fault(where, f"{pattern!r:.80} is not a regular expression: {why}")

    def refer(self, root: dict[str, Any]) -> None:
        """Make every reference begin with ``#/``, whatever address or anchor it named, so that all who follow it need
        no others, and check that none comes back to its own value."""
        for made, where, base in self.references:
            key, name = [(key, made.pop(key)) for key in _REFERENCES if isinstance(made.get(key), str)][-1]
            address, _, part = (base + name if name.startswith("#") else urljoin(base, name)).partition("#")
            inside = part if part.startswith("/") else ""
            place = self.names.get(address if inside or not part else f"{address}#{part}")
            target = referred(f"{place}{inside}", root)
            if not isinstance(target, bool) and id(target) not in self.places:
                raise _fault((*where, key), f"{name!r:.80} is not in the schema")
            made["$ref"] = f"{place}{inside}"
        done: set[int] = set()

        def follow(schema: dict[str, Any], where: tuple[Any, ...], path: frozenset[int]) -> None:
            for keys, part in _here(schema, root):
                if id(part) in path:
                    raise _fault((*where, *keys), "it refers to itself without end")
                if id(part) not in done:
                    follow(part, (*where, *keys), path | {id(part)})
            done.add(id(schema))

        for made, where in reversed(self.made):
            if id(made) not in done:
                follow(made, where, frozenset({id(made)}))


_SETS = re.compile(r"\\.|\[\^?\]|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escapes and sets of characters of a pattern. ECMA has sets of nothing and of everything."""


@functools.lru_cache(maxsize=4096)
def _units(pattern: str) -> int:
    """Return how many units of 16 KiB a pattern has when it is compiled, or 0 if it cannot be read or has over 1024."""
    for units in (1, 4, 16, 64, 256, 512, _UNITS):
        options = jsonschema_rs.RegexOptions(size_limit=_UNIT * units)
        with suppress(jsonschema_rs.ValidationError):
            jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=options)
            return units
    return 0


def _cost(pattern: str, text: str) -> int:
    return 1 + len(text) * (_units(pattern) or _UNITS) // 16
