"""Write configs/ppo/base.yaml: every key of a configuration with its default, and the help that stands beside it.

    python docs/make_base.py

The help texts are those of :func:`trl_ext.ppo.options.option`, in the classes of ``maporl.config``. What a key may name
is listed from the registries. tests/contract/test_configuration_files.py says when the file is stale.
"""

import dataclasses
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import make_api
import yaml

from maporl import BASELINES, PROTOCOLS, RETURNS, RULES, SCALES, SOURCES, TASKS, TRANSFORMS, Task
from maporl.config.engines import ENGINES, IN_PYTHON
from maporl.config.parse import parse_config, to_yaml
from maporl.config.schema import Config
from maporl.environments import ENVIRONMENTS, TOOLS
from maporl.environments.games import GAMES
from maporl.loops.plan import BUILDERS
from maporl.protocols.judging import StepJudge
from maporl.tasks.registry import PRESETS

FILE = Path(__file__).parents[1] / "configs/ppo/base.yaml"
HEAD = """\
This file shows every key of a configuration with its default and says what the key does. Your own configuration starts \
from these values automatically. It needs output_dir, task and agents, and whatever you want to change. `maporl check FILE` \
checks it. Two keys are about the file itself: `extends: other.yaml` overlays another file, and `agent_defaults:` is merged \
into every agent. The mappings of an overlay, and those of --set, are merged key by key. There are exceptions: \
reward.sources replaces all earlier sources, and a task, protocol or game with another name drops the options of the \
earlier one. `make reference` writes this file from the code."""  # noqa: E501
EXAMPLE = {"output_dir": "runs/base", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}}
"""What a configuration must give; the file shows the defaults of all else."""
REGISTRIES: dict[str, list[tuple[str, Mapping[str, Any]]]] = {
    "task": [("Tasks, with their options", TASKS)],
    "agents.ann.engine": [("Engines", {name: engine for name, engine in ENGINES.items() if name != IN_PYTHON})],
    "protocol": [
        ("Protocols, with their options", PROTOCOLS),
        ("A judge of the steps of any protocol, with its options", {"step_judge": StepJudge}),
        ("Games of the protocol game, with their options", GAMES),
    ],
    "reward.sources": [("Sources (docs/rewards.md)", SOURCES)],
    "reward.rules": [("Rules, with their options", RULES)],
    "advantage.returns": [("Returns", RETURNS)],
    "advantage.baseline": [("Baselines", BASELINES)],
    "advantage.scale": [("Scales", SCALES)],
    "advantage.post": [("Transforms, with their options", TRANSFORMS)],
    "tools": [("Tools", TOOLS)],
    "environments": [("Environments", ENVIRONMENTS)],
    "loop.stages": [("Builders, with their options", BUILDERS)],
}
"""The choices that a key has, by its place. Each registry is listed as it stands in the code."""
PYTHON = {"None": None, "True": True, "False": False}
"""The values that YAML writes in another way."""


def text() -> str:
    """Return the text of the file."""
    values = yaml.safe_load(to_yaml(parse_config(EXAMPLE)))
    own = list(Config.__annotations__)
    fields = sorted(dataclasses.fields(Config), key=lambda f: own.index(f.name) if f.name in own else len(own))
    parts = [[*comment(HEAD, 0)]]
    shown: dict[type, str] = {}
    parts += [list(key(f, values[f.name], "", 0, shown)) for f in fields]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def key(field: dataclasses.Field, value: Any, above: str, indent: int, shown: dict[type, str]) -> Iterator[str]:
    """Yield the lines of one key: its help, its choices, and its value, or the keys below it.

    ``above`` is the place of the section, and ``shown`` has the place of each section that the file has shown.
    """
    place, pad = f"{above}{field.name}", " " * indent
    yield from comment(told(field), indent)
    for title, registry in REGISTRIES.get(place, []):
        yield from comment(f"{title}:", indent)
        yield from entries(registry, place, indent, shown)
    kinds = sections(field.type)
    if kinds and isinstance(value, dict) and value:
        yield f"{pad}{field.name}:"
        if place == "agents":
            (name,) = value
            value, place, indent = value[name], f"agents.{name}", indent + 2
            yield f"{pad}  {name}:"
        shown[kinds[0]] = place
        for below in dataclasses.fields(kinds[0]):
            yield from key(below, value[below.name], f"{place}.", indent + 2, shown)
        return
    if kinds:
        yield from keys(kinds, place, "Its keys" if value is None else "The keys of each", indent, 0, shown)
    yield f"{pad}{field.name}: {flow(value)}"


def keys(kinds: list[type], place: str, title: str, indent: int, deep: int, shown: dict[type, str]) -> Iterator[str]:
    """Yield comments with the keys of a section that the file does not contain, ``deep`` columns into the comment.

    A section of one of several ``kinds`` has the keys of that kind.
    """
    if kinds[0] in shown:
        yield from comment(f"{title} are those of {shown[kinds[0]]}.", indent, deep)
        return
    shown[kinds[0]] = place
    yield from comment(f"{title}:", indent, deep)
    if len(kinds) == 1:
        yield from rows(dataclasses.fields(kinds[0]), place, indent, deep + 2, shown)
        return
    (tag,) = set.intersection(*({f.name for f in dataclasses.fields(kind) if is_tag(f)} for kind in kinds))
    tagged = {typing.get_args(f.type)[0]: f for kind in kinds for f in dataclasses.fields(kind) if f.name == tag}
    for value, field in tagged.items():
        yield from comment(f"{tag}: {value}  # {told(field)}", indent, deep + 2, deep + 6)
    fields = {f.name: f for kind in kinds for f in dataclasses.fields(kind) if f.name != tag}
    for name, field in fields.items():
        without = [
            v for v, kind in zip(tagged, kinds, strict=True) if name not in {f.name for f in dataclasses.fields(kind)}
        ]
        having = ", ".join(value for value in tagged if value not in without)
        where = {0: "", 1: f"With any {tag} but {''.join(without)}. "}.get(len(without), f"With {tag}: {having}. ")
        yield from rows([field], place, indent, deep + 2, shown, where)


def is_tag(field: dataclasses.Field) -> bool:
    """Return whether a key has one value, which says of which kind a section is."""
    return typing.get_origin(field.type) is typing.Literal and len(typing.get_args(field.type)) == 1 and needed(field)


def rows(
    fields: Iterable[dataclasses.Field], place: str, indent: int, deep: int, shown: dict[type, str], where: str = ""
) -> Iterator[str]:
    """Yield a comment for each key: its default, and its help. ``where`` begins the help."""
    for field in fields:
        kinds, help, default = sections(field.type), where + told(field), ""
        if needed(field):
            help += " It must be given."
        elif not dataclasses.is_dataclass(default_of(field)):
            default = flow(default_of(field))
        if len(default) > 40:
            help, default = f"{help} Default: {default}", ""
        name = f"{field.name.removesuffix('_')}:{' ' if default else ''}{default}"
        yield from comment(f"{name}  # {help}", indent, deep, deep + 4)
        if kinds:
            yield from keys(kinds, f"{place}.{field.name}", "Its keys", indent, deep + 4, shown)


def entries(registry: Mapping[str, Any], place: str, indent: int, shown: dict[type, str]) -> Iterator[str]:
    """Yield comments with what a registry names, and with the options of each class."""
    sentences = {
        name: re.sub(r"^(Return (the source `\w+`: )?|`\w+`: )", "", make_api.described(part))
        for name, part in registry.items()
    }
    if not any(sentences.values()):
        yield from comment(", ".join(registry), indent, 2)
        return
    for name, part in registry.items():
        words, fields = f"{name}: {sentences[name]}".replace("\\|", "|"), options_of(part)
        if fields and part in shown:
            preset = ", ".join(f"{key}: {flow(value)}" for key, value in PRESETS[name].items())
            yield from comment(f"{words} Its options are those of {shown[part]}, with {preset}.", indent, 2, 6)
        else:
            shown[part] = name
            yield from comment(words, indent, 2, 6)
            yield from rows(fields, place, indent, 6, shown)


def options_of(part: Any) -> list[dataclasses.Field]:
    """Return the options of a registered class. Those that the run sets itself are left out."""
    if not isinstance(part, type) or not dataclasses.is_dataclass(part):
        return []
    hidden = {"split", "seed"} if issubclass(part, Task) else set()
    return [field for field in dataclasses.fields(part) if field.name not in hidden]


def sections(hint: Any) -> list[type]:
    """Return the sections that stand in a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    # one that may also be a list of itself stands there twice
    return list(dict.fromkeys(kind for part in typing.get_args(hint) for kind in sections(part)))


def needed(field: dataclasses.Field) -> bool:
    """Return whether a key has no default."""
    return field.default is field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a key that has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    style = '"' if "\n" in str(value) else None
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump([plain], default_flow_style=True, default_style=style, width=10**6).strip()[1:-1]


def told(field: dataclasses.Field) -> str:
    """Return the help of a key, with values as YAML writes them."""
    return re.sub(r"\b(None|True|False)\b", lambda name: flow(PYTHON[name[0]]), field.metadata["help"])


def comment(words: str, indent: int, first: int = 0, later: int | None = None) -> Iterable[str]:
    """Return a comment of at most 120 columns, whose lines begin ``first`` and ``later`` columns into it."""
    begin = f"{' ' * indent}# "
    return textwrap.wrap(
        words,
        120,
        initial_indent=begin + " " * first,
        subsequent_indent=begin + " " * (first if later is None else later),
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
