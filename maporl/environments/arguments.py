"""Check the arguments that a model wrote against a tool's schema, before the tool is called. Imports no torch."""

from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry

from maporl.environments.base import CallRefused, Tool
from maporl.errors import ConfigError


class ArgumentCheck:
    """Checks and converts the arguments of calls of one tool.

    Raises:
        ConfigError: the tool's ``parameters`` are not a valid JSON schema.
    """

    def __init__(self, tool: Tool):
        self.schema = tool.parameters
        kind = validator_for(self.schema)
        error = best_match(kind(kind.META_SCHEMA).iter_errors(self.schema))
        if error is not None:
            where = ".".join(["parameters", *map(str, error.absolute_path)])
            raise ConfigError(f"tool {tool.name}: {where}: {error.message[:200]}; give a valid JSON schema")
        # without a registry a reference to another address would be fetched
        self._validator: Any = kind(self.schema, registry=Registry())

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the ``arguments`` of a call as the schema wants them.

        Numbers and truth values in quotes are converted, because small models often write them so.

        Raises:
            CallRefused: an argument is missing, unknown or of the wrong type. The message is for the agent.
        """
        properties = self.schema.get("properties", {})
        given = {name: _converted(value, properties.get(name)) for name, value in arguments.items()}
        if missing := [name for name in self.schema.get("required", []) if name not in given]:
            raise CallRefused("arguments", f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        open_ended = self.schema.get("additionalProperties", False) or "patternProperties" in self.schema
        if not open_ended and (unknown := [name for name in given if name not in properties]):
            takes = ", ".join(properties) or "nothing"
            raise CallRefused("arguments", f"unknown {', '.join(unknown)[:80]}; it takes {takes}")
        error = best_match(self._validator.iter_errors(given))
        if error is not None:
            where = ".".join(str(part) for part in error.absolute_path)
            raise CallRefused("arguments", f"{where + ': ' if where else ''}{' '.join(error.message.split())[:200]}")
        return given


def _converted(value: Any, schema: Any) -> Any:
    """Return ``value`` as a number or truth value, if the schema wants one and ``value`` is its text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str) or kind not in ("integer", "number", "boolean"):
        return value
    text = value.strip().lower()
    if kind == "boolean":
        return {"true": True, "false": False}.get(text, value)
    try:
        return int(text) if kind == "integer" or text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return value
