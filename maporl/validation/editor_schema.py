"""The JSON schema of configuration files, for editors: their keys, and the options of the parts that they name."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from maporl.advantages.transforms import TRANSFORMS
from maporl.config import parse
from maporl.config.imports import Parts
from maporl.environments.games import GAMES
from maporl.protocols import PROTOCOLS
from maporl.protocols.judging import StepJudge
from maporl.rewards.rules import RULES
from maporl.tasks.registry import TASKS

IMPORT = r"^[^\s:]+:[^\s:]+$"
"""The names ``MODULE:OBJECT`` of the user's own parts, whose options are not known here."""


def editor_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, in which each name of a part has the options of this part.

    The parts are tasks, protocols, games, rules, transforms and builders. No option is required, because a file that
    extends another one may leave it out.
    """
    schema = parse.json_schema()
    parts = _Parts(schema["$defs"])
    judge = {"anyOf": [{"type": "null"}, parts.section(StepJudge)]}
    agents = {"type": ["array", "null"], "items": {"type": "string"}}
    schema["properties"]["task"] |= parts.by_name(TASKS, {}, hidden={"split"})
    schema["properties"]["protocol"] |= parts.by_name(
        PROTOCOLS, {"agents": agents, "sampling": {"type": ["object", "null"]}, "step_judge": judge}
    )
    for name, kind in GAMES.installed().items():
        game = {"properties": {"game": {"const": name}}, "required": ["game"]}
        of_game = {"properties": {"options": parts.section(kind)}}
        schema["properties"]["protocol"]["allOf"].append({"if": game, "then": of_game})
    for section, key, table in (("RewardSection", "rules", RULES), ("AdvantageConfig", "post", TRANSFORMS)):
        schema["$defs"][section]["properties"][key]["items"] = parts.entry(table)
    for definition in list(schema["$defs"].values()):
        if "build" in definition.get("properties", {}):
            definition["properties"]["build"] = {
                "description": definition["properties"]["build"]["description"], "$ref": "#/$defs/Builder",
            }  # fmt: skip
    builders = Parts({"build": "maporl.loops.plan:BUILDERS"}).installed()
    schema["$defs"]["Builder"] = parts.entry(builders.get("build", Parts()))
    return schema


class _Parts:
    """Makes schemas of the options of parts. What their types name goes to ``definitions``."""

    def __init__(self, definitions: dict[str, Any]):
        self.definitions = definitions

    def section(self, kind: Any, also: Mapping[str, Any] | None = None, hidden: Iterable[str] = ()) -> dict[str, Any]:
        """Return the schema of a mapping with the options of the class ``kind``, but those that are ``hidden``."""
        schema = TypeAdapter(kind).json_schema()
        self.definitions |= schema.pop("$defs", {})
        options = {}
        for field in dataclasses.fields(kind):
            if field.name in schema["properties"] and field.name not in hidden:
                help = {"description": field.metadata.get("help", "")}
                options[field.name.removesuffix("_")] = help | schema["properties"][field.name]
        return {"type": "object", "properties": {**(also or {}), **options}, "additionalProperties": False}

    def by_name(self, table: Parts, also: Mapping[str, Any], hidden: Iterable[str] = ()) -> dict[str, Any]:
        """Return what a section has besides: its key ``name``, and the options of the part with this name."""
        conditions = []
        for name, kind in table.installed().items():
            named = {"properties": {"name": {"const": name}}, "required": ["name"]}
            conditions.append({"if": named, "then": self.section(kind, {"name": True, **also}, hidden)})
        return {"properties": {"name": _name_of(table)}, "allOf": conditions}

    def entry(self, table: Parts) -> dict[str, Any]:
        """Return the schema of a name, or of one mapping ``{name: options}``."""
        sections = {name: {"anyOf": [{"type": "null"}, self.section(kind)]} for name, kind in table.installed().items()}
        named = {"type": "object", "properties": sections, "patternProperties": {IMPORT: {}}}
        return {"anyOf": [_name_of(table), {**named, "additionalProperties": False, "maxProperties": 1}]}


def _name_of(table: Parts) -> dict[str, Any]:
    return {"anyOf": [{"enum": list(table)}, {"type": "string", "pattern": IMPORT}]}
