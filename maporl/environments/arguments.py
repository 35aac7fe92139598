"""Check the arguments that a model wrote against a tool's schema, before the tool is called. Imports no torch."""

from typing import Any

from maporl.environments.base import CallRefused, Tool
from maporl.environments.schemas import BoundedSchema, TooMuch
from maporl.errors import ConfigError
from trl_ext.chat.written_calls import KINDS, kinds_of, referred
from trl_ext.chat.written_values import DEEPEST, Unreadable, check_value, whole_value

_ELSEWHERE = ("patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
"""Keywords beside ``properties`` that may allow further arguments."""


class ArgumentCheck:
    """Checks and converts the arguments of calls of one tool, in bounded time.

    Raises:
        ConfigError: the tool's ``parameters`` are not a valid JSON schema (:class:`BoundedSchema`).
    """

    def __init__(self, tool: Tool):
        try:
            self._bounded = BoundedSchema(tool.parameters)
        except ConfigError as error:
            raise ConfigError(f"tool {tool.name}: {error}") from None
        self.schema = self._bounded.schema

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the ``arguments`` of a call as the schema wants them.

        Models write values in other ways than a schema has them, and what is meant is clear: numbers, truth values and
        lists as texts, 4.0 for 4, and null for an optional argument that they leave out.

        Raises:
            CallRefused: an argument is missing, unknown, of the wrong type, or too deep. The message is for the agent.
        """
        try:
            check_value(arguments)
            self._bounded.begin()
            fitted = self._fitted(arguments, self.schema, 0)
            self._check_names(fitted)
            error = self._bounded.error(fitted)
        except (TooMuch, Unreadable) as error:
            raise CallRefused("arguments", str(error)[:200]) from None
        if error is not None:
            where = ".".join(str(part) for part in error.absolute_path)
            raise CallRefused("arguments", f"{where + ': ' if where else ''}{' '.join(error.message.split())[:200]}")
        return fitted

    def _check_names(self, arguments: dict[str, Any]) -> None:
        properties = _dict(self.schema.get("properties"))
        if missing := [name for name in _names(self.schema.get("required")) if name not in arguments]:
            raise CallRefused("arguments", f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        open_ended = self.schema.get("additionalProperties", False) or any(key in self.schema for key in _ELSEWHERE)
        if not open_ended and (unknown := [name for name in arguments if name not in properties]):
            takes = ", ".join(properties) or "nothing"
            raise CallRefused("arguments", f"unknown {', '.join(unknown)[:80]}; it takes {takes}")

    def _fitted(self, value: Any, schema: Any, depth: int) -> Any:
        """Return ``value`` as ``schema`` wants it, if it is clear what is meant, and otherwise as it is."""
        self._bounded.step()
        for _ in range(16):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = referred(schema["$ref"], self.schema)
        if not isinstance(schema, dict) or depth > DEEPEST:
            return value
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else []:
            value = self._fitted(value, part, depth + 1)
        ways: list[Any] = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])
        if ways and not any(self._fits(value, way) for way in ways):
            value = self._one_of(value, ways, depth)
        value = _converted(value, kinds_of(schema, self.schema))
        if isinstance(value, list):
            prefix, rest = schema.get("prefixItems", []), schema.get("items")
            prefix, rest = (rest, schema.get("additionalItems")) if isinstance(rest, list) else (prefix, rest)
            return [self._fitted(one, prefix[n] if n < len(prefix) else rest, depth + 1) for n, one in enumerate(value)]
        return self._object(value, schema, depth) if isinstance(value, dict) else value

    def _one_of(self, value: Any, ways: list[Any], depth: int) -> Any:
        """Return ``value`` as the first of several schemas wants it that it then fits."""
        for way in ways:
            fitted = self._fitted(value, way, depth + 1)
            if self._fits(fitted, way):
                return fitted
        return value

    def _fits(self, value: Any, way: Any) -> bool:
        return self._bounded.error(value, way) is None

    def _object(self, value: dict[str, Any], schema: Any, depth: int) -> dict[str, Any]:
        properties, needed = _dict(schema.get("properties")), _names(schema.get("required"))
        others = schema.get("additionalProperties")
        fitted = {}
        for name, one in value.items():
            part = properties.get(name, others)
            kinds = kinds_of(part, self.schema)
            left_out = one is None and name in properties and name not in needed and kinds and "null" not in kinds
            if not left_out:
                fitted[name] = self._fitted(one, part, depth + 1)
        return fitted


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _names(value: Any) -> list[str]:
    return value if isinstance(value, list) else []  # in draft 3 it is a truth value of each property


def _converted(value: Any, kinds: set[str]) -> Any:
    """Return ``value`` as one of ``kinds``, if it is the text of one or a number that is whole."""
    if isinstance(value, str) and kinds and "string" not in kinds:
        value = _meant(value, kinds)
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
        return int(value)
    return value


def _meant(text: str, kinds: set[str]) -> Any:
    """Return the value that a text is, if this is of one of ``kinds``, and the text otherwise."""
    words = text.strip()
    if words.lower() in ("true", "false"):
        return words.lower() == "true" if "boolean" in kinds else text
    try:
        value = whole_value(words)
    except Unreadable:
        return text
    kind = KINDS[type(value)]
    number = kind == "integer" and "number" in kinds
    whole = kind == "number" and "integer" in kinds and value.is_integer()
    return value if kind in kinds or number or whole else text
