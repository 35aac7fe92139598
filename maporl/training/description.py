"""Describe a run that was made in Python as a configuration does. This is the inverse of ``maporl.runs.build``.

Tasks and protocols are dataclasses, so their options can be written down. A part that comes with maporl has a name, and
so has a class or a function of a module that another process can import (:mod:`maporl.config.imports`). Any other part
is described by the name of its class or function, and ``only_in_python`` lists it: what a script, a notebook or a
function defines, and a lambda. A description is checked by building the part again from it.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from os.path import abspath
from pathlib import Path
from typing import Any

from maporl.advantages.baselines import BASELINES
from maporl.advantages.returns import RETURNS
from maporl.advantages.scales import SCALES
from maporl.advantages.transforms import TRANSFORMS
from maporl.config.imports import Parts, import_folder, import_name
from maporl.config.parse import validated
from maporl.config.schema import TrainingOptions
from maporl.environments.base import Tool
from maporl.errors import UserError
from maporl.protocols import PROTOCOLS, build_protocol, speakers
from maporl.protocols.base import Protocol
from maporl.protocols.judging import judge_of, unjudged_kind
from maporl.rewards.build import find_source
from maporl.rewards.rules import RULES
from maporl.tasks import TASKS, build_task
from maporl.team.saving import SavedTeam
from maporl.training.parts import RunParts
from trl_ext.ppo.losses import OBJECTIVES
from trl_ext.ppo.options import DefaultRate, PPOOptions

MOST = 100
"""An option with more entries than this, such as a list of examples, is not written into a configuration."""
_HERE = ("maporl", "trl_ext")
_GUARD = "; put what its script does below if __name__ == '__main__':, and name the file as a module"
"""What makes a class of a script one that another process can import."""
_UNNAMED = (
    "adam_beta1",
    "adam_epsilon",
    "optim_args",
    "warmup_ratio",
    "gradient_checkpointing_kwargs",
    "logging_steps",
)
"""Arguments that change a run and that no configuration has. They are listed where they differ from the defaults."""


def describe(parts: RunParts, team: SavedTeam) -> dict[str, Any]:
    """Return the configuration of a run as plain values. All batch counts in ``parts.args`` are filled in."""
    return _Description(parts, team).values()


class _Description:
    def __init__(self, parts: RunParts, team: SavedTeam):
        self.parts, self.team = parts, team
        self.only_in_python: dict[str, str] = {}
        self.folders: dict[str, None] = {}  # where the user's own modules lie, in order

    def values(self) -> dict[str, Any]:
        parts, args = self.parts, self.parts.args
        task = self._task()
        values = {
            "output_dir": abspath(str(args.output_dir)),
            "task": task,
            "agents": self.team.sections(),
            "protocol": self._protocol(),
            "seed": args.seed,
            "updates": args.num_total_batches,
            "branching": _plain(dataclasses.asdict(parts.branching)),
            "reward": self._reward(),
            "advantage": self._advantage(),
            "schedule": self._schedule(task),
            "ppo": self._ppo(),
            "training": self._training(),
            "evaluation": {
                "questions": args.eval_questions if parts.eval_task is not None else 0,
                "temperature": args.eval_temperature, "top_p": args.eval_top_p, "top_k": args.eval_top_k,
            },
            "restate": args.restate,
            "dialogues_logged": args.dialogues_logged,
            "tools": self._tools(),
            "environments": self._environments(),
        }  # fmt: skip
        self._add_sampling(values)
        for agent, grant in self.parts.tools.grants.items():
            if grant.tools:
                values["agents"][agent]["tools"] = list(grant.tools)
        only = self.only_in_python | self.team.only_in_python
        return values | {"pythonpath": list(self.folders), "only_in_python": only}

    def _add_sampling(self, values: dict[str, Any]) -> None:
        """Add how agents and roles are sampled to the sections that say so."""
        sampling = self.parts.sampling
        for agent, options in sampling.agents.items():
            values["agents"][agent]["sampling"] = _plain(dataclasses.asdict(options))
        for section, entries in (("protocol", sampling.roles), ("evaluation", sampling.held_out)):
            if entries:
                plain = {name: _plain(dataclasses.asdict(options)) for name, options in entries.items()}
                values[section]["sampling"] = plain

    # -- parts with a class ---------------------------------------------------------------------------------------

    def _task(self) -> dict[str, Any]:
        task, seed = self.parts.task, self.parts.args.seed
        section = self._named("task", TASKS, task)
        if any(key.split(".")[0] == "task" for key in self.only_in_python):
            return section
        if not _works(lambda: build_task(section, "train", seed), task):
            self.only_in_python["task"] = f"{_called(task)} of other data or of another split"
        held_out = self.parts.eval_task
        if held_out is not None and not _works(lambda: build_task(section, "eval", seed), held_out):
            self.only_in_python["eval_task"] = f"{_called(held_out)} with other options than the task's own eval split"
        return section

    def _protocol(self) -> dict[str, Any]:
        names, players = tuple(self.team.agents), self.parts.speakers
        section = self._named("protocol", PROTOCOLS, self.parts.protocol)
        if "protocol" in self.only_in_python:
            return section if players == names else section | {"agents": list(players)}
        if speakers(section, names, self.parts.protocol) != players:
            section["agents"] = list(players)
        if (judge := judge_of(self.parts.protocol)) is not None:
            section["step_judge"] = _plain(dataclasses.asdict(judge))
        if not _works(lambda: build_protocol(section, names), self.parts.protocol):
            self.only_in_python["protocol"] = f"{_called(self.parts.protocol)} with options that cannot be written down"
        return section

    def _named(self, key: str, registry: Parts, part: Any) -> dict[str, Any]:
        """Return the name and the options of a task or a protocol. Options that cannot be written down are left out."""
        kind = unjudged_kind(part) if isinstance(part, Protocol) else type(part)
        name = registry.name_of(kind) if _comes_with_maporl(kind) else None
        if name is None and dataclasses.is_dataclass(part):
            name = self._imported(kind)
        if name is None:
            why = "which no other process can import" if dataclasses.is_dataclass(part) else "which is not a dataclass"
            if dataclasses.is_dataclass(part) and kind.__module__ == "__main__" and "." not in kind.__qualname__:
                why += _GUARD
            self.only_in_python[key] = f"{_called(part)}, {why}"
        options = {}
        for option in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            try:
                options[option.name] = _plain(vars(part)[option.name])
            except (ValueError, KeyError):
                self.only_in_python[f"{key}.{option.name}"] = "an option that cannot be written down"
        options.pop("split", None)  # a run reads both splits
        return {"name": name or _called(part), **options}

    def _imported(self, part: Any) -> str | None:
        """Return the name ``MODULE:OBJECT`` of a class or a function, or None if another process cannot import it."""
        name = import_name(part)
        if name is not None and (folder := import_folder(name)) is not None:
            self.folders[folder] = None
        return name

    def _tools(self) -> dict[str, Any]:
        """Return the tools that are functions which another process can import. The others are listed."""
        tools = {}
        for name, tool in self.parts.tools.world.tools.items():
            imported = self._imported(tool.run)
            if imported is None or not _works(partial(Tool.of, tool.run, tool.name), tool):
                self.only_in_python[f"tools.{name}"] = _called(tool.run)
            tools[name] = {"use": imported or _called(tool.run)}
        return tools

    def _environments(self) -> dict[str, Any]:
        sections = {}
        for name, spec in self.parts.tools.world.environments.items():
            imported = self._imported(spec.part)
            if imported is None:
                self.only_in_python[f"environments.{name}"] = _called(spec.part)
            section = _plain(dataclasses.asdict(spec.options))
            sections[name] = section | {"use": imported or _called(spec.part), "agents": list(spec.agents)}
        return sections

    # -- sections -------------------------------------------------------------------------------------------------

    def _reward(self) -> dict[str, Any]:
        section = _plain(dataclasses.asdict(self.parts.reward))
        section["rules"] = self._entries("reward.rules", RULES, section["rules"])
        for name, source in self.parts.sources.items():
            imported = self._imported(source)
            fits = imported is not None and _works(partial(find_source, imported))
            asked = name in section["sources"] or name in section["charges"]
            if not fits or not asked or name in json.dumps(section["rules"]):
                self.only_in_python[f"reward.sources.{name}"] = _called(source)
                continue
            for part in ("sources", "charges"):  # the metrics of a run that is built from here have this name too
                section[part] = {imported if key == name else key: w for key, w in section[part].items()}
        return section

    def _advantage(self) -> dict[str, Any]:
        section = _plain(dataclasses.asdict(self.parts.advantage))
        for key, registry in (("returns", RETURNS), ("baseline", BASELINES), ("scale", SCALES)):
            [section[key]] = self._entries(f"training.advantage.{key}", registry, [section[key]])
        section["post"] = self._entries("training.advantage.post", TRANSFORMS, section["post"])
        return section

    def _entries(self, key: str, registry: Mapping[str, Any], entries: Sequence[Any]) -> list[Any]:
        """Return ``entries``, which are names or ``{name: options}``, with names that another process can look up."""
        # parts that the program has added to a visible dict are imported by another name, or listed
        named = []
        for entry in entries:
            name = entry if isinstance(entry, str) else next(iter(entry))
            importable = name
            if name in registry and not _comes_with_maporl(registry[name]):
                imported = self._imported(registry[name])
                if imported is None:
                    self.only_in_python[f"{key}.{name}"] = _called(registry[name])
                importable = imported or name
            named.append(importable if isinstance(entry, str) else {importable: entry[name]})
        return named

    def _schedule(self, section: dict[str, Any]) -> dict[str, Any]:
        seed = self.parts.args.seed
        stages = []
        for update, task in self.parts.curriculum:
            task_section = self._named("training.curriculum", TASKS, task)
            changed = {key: value for key, value in task_section.items() if section.get(key, ()) != value}
            if not _works(partial(build_task, section | changed, "train", seed), task):
                self.only_in_python[f"training.curriculum.{update}"] = _called(task)
            stages.append({"update": update, "task": changed})
        return _plain(dataclasses.asdict(self.parts.schedule)) | {"curriculum": stages}

    def _ppo(self) -> dict[str, Any]:
        [objective] = self._entries("training.objective", OBJECTIVES, [self.parts.args.objective])
        return self._section("ppo", PPOOptions, {"total_episodes": None, "objective": objective})

    def _training(self) -> dict[str, Any]:
        """Return the options of training, and list those that no configuration has."""
        args = self.parts.args
        replaced: dict[str, Any] = {} if args.save_strategy != "no" else {"save_steps": 0}
        if args.eval_strategy == "no":
            replaced["eval_steps"] = None
        if isinstance(args.learning_rate, DefaultRate):
            replaced["learning_rate"] = None
        section = self._section("training", TrainingOptions, replaced)
        for option in dataclasses.fields(args):
            if option.name in _UNNAMED and (value := vars(args)[option.name]) != option.default:
                self.only_in_python[f"training.{option.name}"] = str(value)[:200]
        for callback in self.parts.callbacks:
            self.only_in_python[f"training.callbacks.{type(callback).__name__}"] = _called(callback)
        return section

    def _section(self, key: str, kind: type, replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the dataclass ``kind`` that the arguments have. A value that it refuses is listed."""
        section = {f.name: vars(self.parts.args)[f.name] for f in dataclasses.fields(kind)} | dict(replaced)
        for name, value in list(section.items()):
            try:
                section[name] = _plain(value)
            except ValueError:
                self.only_in_python[f"training.{name}"] = str(section.pop(name))[:200]
        if not _works(partial(validated, kind, section, key)):
            usual = vars(kind())
            for name, value in list(section.items()):
                if value == usual[name] or _works(partial(validated, kind, {name: value}, key)):
                    continue
                self.only_in_python[f"training.{name}"] = str(section.pop(name))[:200]
        return section


def _plain(value: Any) -> Any:
    """Return ``value`` as YAML holds it: texts, numbers, lists and mappings."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping) and len(value) <= MOST and all(isinstance(key, str) for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple) and len(value) <= MOST:
        return [_plain(entry) for entry in value]
    if isinstance(value, set | frozenset) and len(value) <= MOST:
        return sorted(_plain(entry) for entry in value)
    raise ValueError(f"a configuration cannot hold a {type(value).__name__}")


def _works(build: Callable[[], Any], *part: Any) -> bool:
    """Return whether a configuration takes what ``build`` builds, and this is equal to ``part`` if one is given."""
    try:
        made = build()
        return all(bool(made == one) for one in part)
    except (UserError, ValueError, TypeError):
        return False


def _comes_with_maporl(part: Any) -> bool:
    """Return whether a class, a function, or every function of a slot comes with this package."""
    inside = [part] if callable(part) else [value for value in vars(part).values() if callable(value)]
    return all(_module(value).split(".")[0] in _HERE for value in inside)


def _called(part: Any) -> str:
    """Return the name by which people find a part: that of its class, or its own if it is a class or a function."""
    # it has no colon, so that nothing takes it for the name of something to import
    named = part if isinstance(part, type) or hasattr(part, "__qualname__") else type(part)
    return f"{_module(named)}.{named.__qualname__}"


def _module(part: Any) -> str:
    return str(getattr(part, "__module__", None))
