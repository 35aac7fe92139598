"""Read a configuration from YAML and dotted overrides into dataclasses. Imports no torch.

The dataclasses of :mod:`maporl.config.schema` *are* the schema. This module checks keys and types. Whether the parts
fit each other is checked by :mod:`maporl.validation`.
"""

import dataclasses
import difflib
import errno
import glob
import inspect
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import yaml
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from maporl.config.algorithm import NOT_LEARNED, OF_LEARNER
from maporl.config.faults import explain, nearest_key
from maporl.config.imports import kind_of, look_up, unknown
from maporl.config.safe_yaml import DEEPEST, dump_yaml, parse_value, read_yaml_file
from maporl.config.schema import Config, RewardSection
from maporl.errors import ConfigError, one_line
from maporl.storage.run_folder import where_it_lies
from maporl.text import visible
from trl_ext.process.messages import tell

PATHS = (
    "model", "tokenizer", "adapter", "chat_template", "source", "eval_source", "encoder", "folder", "corpus",
    "references", "dialogues",
)  # fmt: skip
"""The keys of a configuration whose values may be folders or files."""
MOST_FAULTS = 8
"""The faults of a configuration that a message names. An untrusted one may have thousands."""


def read_values(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read the plain values of a configuration, without checking them.

    ``path`` is a YAML file, or the name of a recipe or of another configuration that comes with maporl. ``overrides``
    are ``a.b=c`` with YAML values.

    Raises:
        ConfigError: the file is missing, or an override cannot be read.
    """
    file = Path(path)
    if file.suffix == "" and not os.path.isfile(file):
        recipes = recipe_files() | configuration_files()
        if str(path) not in recipes and len(file.parts) == 1 and not os.path.isdir(file):
            raise ConfigError(f"{visible(path):.200}: no such file or folder; a recipe {unknown(str(path), recipes)}")
        if str(path) in recipes:  # it comes with maporl, so the user's own modules are in the present folder
            return override(read_yaml(recipes[str(path)]), overrides or [], [Path.cwd()])
    files = _read_files(file)
    values = where_it_lies(_merged(files), file.parent) if file.name == "config.yaml" else _merged(files)
    return override(values, overrides or [], [path.parent for path, _ in files])


def override(values: dict[str, Any], overrides: Sequence[str], folders: Iterable[Path]) -> dict[str, Any]:
    """Return ``values`` with those of ``overrides``, and with all folders of modules in ``pythonpath``.

    Modules are looked for in the ``folders`` of the configuration's files and then in those that the files name. The
    folders that the user names in the overrides come first. They are relative to the present folder.

    Raises:
        ConfigError: an override cannot be read.
    """
    file_folders = [str(folder.resolve()) for folder in folders]
    user_folders = apply_overrides({}, overrides).get("pythonpath")
    values = apply_overrides(values, overrides)
    parts = (
        (file_folders, values.get("pythonpath", []))
        if user_folders is None
        else (_absolute(user_folders, Path.cwd()), file_folders)
    )
    wrong = [part for part in parts if not isinstance(part, list)]  # the schema refuses it
    values = _with_algorithms(values)
    return values | {"pythonpath": wrong[0] if wrong else [*parts[0], *parts[1]]}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, for editors.

    No key is required, because a file that extends another one may leave out its keys.
    """
    schema = _reader(Config).json_schema()
    schema.pop("required", None)
    agent = dict(schema["$defs"]["AgentSection"])
    agent.pop("required", None)
    schema["$defs"]["Algorithm"]["properties"]["extends"] = {
        "type": "string",
        "description": "The name of a recipe, of which the policy takes the algorithm.",
    }
    schema["properties"] |= {
        "extends": {
            "type": "string",
            "description": "A file beside this one, or a recipe's name, whose values this file overrides.",
        },
        "agent_defaults": {**agent, "description": "Merged into every agent."},
        "recipe": {"type": "object", "description": "Where a method comes from."},
        "pythonpath": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "Folders, beside that of this file, in which modules of MODULE:OBJECT are looked for.",
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A configuration of maporl", **schema}


def parse_config(values: dict[str, Any], where: str = "configuration") -> Config:
    """Build a configuration from plain values. This checks keys and types only.

    Messages begin with ``where``.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type. The message names the key and the
            nearest known keys.
    """
    _check_values(values, where)
    values = with_home(values)
    values.pop("recipe", None)
    defaults = values.pop("agent_defaults", None)
    if not isinstance(defaults, dict | None):
        raise ConfigError(f"{where}: agent_defaults: expected options of agents by name, got {defaults!r:.80}")
    agents = values.get("agents")
    if isinstance(agents, dict):  # the schema refuses an agent that is not a mapping
        values["agents"] = {
            name: merge(defaults or {}, section or {}) if isinstance(section, dict | None) else section
            for name, section in agents.items()
        }
    return validated(Config, values, where)


def with_home(values: Any, done: dict[int, Any] | None = None) -> Any:
    """Return plain values with the home folder of this user in every text that begins with ``~/``.

    A shell writes it into a word of its own, but not behind ``=``, and nobody does in a file. ``done`` has what was
    made of each list and mapping, by identity, so that values that are named often are read once. Those that hold
    themselves are refused later.

    >>> with_home({"output_dir": "~/runs", "updates": 3})["output_dir"] == os.path.expanduser("~/runs")
    True
    """
    done = {} if done is None else done
    if isinstance(values, str):
        return os.path.expanduser(values) if values.startswith("~/") else values
    if not isinstance(values, dict | list):
        return values
    if id(values) not in done:
        done[id(values)] = values
        if isinstance(values, dict):
            done[id(values)] = {key: with_home(value, done) for key, value in values.items()}
        else:
            done[id(values)] = [with_home(value, done) for value in values]
    return done[id(values)]


def lasting(values: Any, key: str = "") -> Any:
    """Return the plain values of a configuration with whole paths in place of those relative to the present folder.

    So they mean the same from everywhere. These are ``output_dir``, and what stands under one of the keys :data:`PATHS`
    and is here.
    """
    if isinstance(values, dict):
        return {name: value if name == "api" else lasting(value, name) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(lasting(value, key) for value in values)
    is_here = isinstance(values, str) and key in PATHS and (os.path.exists(values) or glob.glob(values))
    return os.path.abspath(values) if is_here or key == "output_dir" else values


def to_yaml(config: Config) -> str:
    """Return the YAML text of a configuration with all its values. Reading it gives an equal configuration."""
    return dump_yaml(dataclasses.asdict(config))


def leaves(values: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value but mappings and lists, with its dotted key."""
    if isinstance(values, Mapping | list | tuple):
        parts = values.items() if isinstance(values, Mapping) else enumerate(values)
        for name, part in parts:
            yield from leaves(part, f"{at}.{name}" if at else str(name))
    else:
        yield at, values


def validated(kind: Any, values: dict[str, Any], where: str) -> Any:
    """Build an instance of the dataclass ``kind`` from plain values.

    Raises:
        ConfigError: values are wrong. The message begins with ``where`` and names the first faults.
    """
    _must_be_buildable(kind, where)
    for key in values:  # pydantic refuses unknown keys of its own dataclasses only, and tasks are plain dataclasses
        if not is_pydantic_dataclass(kind) and key not in {f.name for f in dataclasses.fields(kind)}:
            if key in inspect.get_annotations(kind):
                raise ConfigError(
                    f"{where}: {key!r:.80} is not an option of {kind_of(kind)}, because only a class that it derives "
                    "from is a dataclass; put @dataclass(frozen=True) above it too"
                )
            raise ConfigError(f"{where}: unknown key {key!r:.80}; {nearest_key(kind, str(key))}")
    try:
        built = _reader(kind).validate_python(values)
    except ValidationError as error:
        lines = explain(kind, error.errors())
        more = [f"and {len(lines) - MOST_FAULTS} more faults"] if len(lines) > MOST_FAULTS else []
        raise ConfigError(f"{where}: " + "; ".join([*lines[:MOST_FAULTS], *more])) from None
    except PydanticUserError as error:
        raise ConfigError(
            f"{where}: {kind_of(kind)} has a field that no configuration can set ({one_line(error):.200}); give it a "
            "type such as int, or compute it in a cached_property"
        ) from None
    _check_values(dataclasses.asdict(built), where)  # pydantic also makes numbers of texts
    return built


@lru_cache(maxsize=1024)
def _reader(kind: Any) -> TypeAdapter:
    """Return what reads values as ``kind``. To make one takes as long as to read a whole configuration by it."""
    return TypeAdapter(kind)


def entry_name(entry: str | Mapping[str, Any]) -> str:
    """Return the name in an entry of :func:`build_named`."""
    return entry if isinstance(entry, str) else next(iter(entry))


def _must_be_buildable(kind: Any, where: str) -> None:
    """Check that the class ``kind``, which may be the user's own, is a whole dataclass."""
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"{where}: {kind_of(kind)} is not a dataclass; write @dataclass(frozen=True) above")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(f"{where}: {kind_of(kind)} does not define {', '.join(missing)}; define it")


def build_named(
    entries: Iterable[str | dict[str, dict[str, Any]]], known: Mapping[str, Any], where: str, base: type | None = None
) -> list[Any]:
    """Build the parts that ``entries`` name, in their order.

    An entry is a name, or one mapping ``{name: options}``. A name is one of ``known``, or ``MODULE:OBJECT`` for a class
    that derives from ``base``.

    Raises:
        ConfigError: a name is unknown, or its options are wrong. The message begins with ``where``.
    """
    parts = []
    for entry in entries:
        if isinstance(entry, dict) and len(entry) != 1:
            raise ConfigError(f"{where}: expected a name or one {{name: options}}, got {entry!r:.80}")
        name = entry_name(entry)
        options = {} if isinstance(entry, str) else entry[name]
        parts.append(validated(look_up(name, known, where, base), options or {}, f"{where}.{name}"))
    return parts


def read_yaml(path: Path, extends: bool = True) -> dict[str, Any]:
    """Return the mapping in a YAML file, with the values of the file that it ``extends``.

    ``extends=False`` is for the ``config.yaml`` of a run or a team, which is whole. If a stranger wrote it, it could
    name any file here.

    Raises:
        ConfigError: the file is missing, is not a YAML mapping, has a key twice, extends itself, or may not extend.
    """
    return _merged(_read_files(path, extends=extends))


def extended_files(path: Path) -> list[Path]:
    """Return the files that a YAML file extends, the nearest first.

    Raises:
        ConfigError: a file is missing or is wrong (:func:`read_yaml`).
    """
    return [file for file, _ in _read_files(path)[1:]]


def _merged(files: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _, over in reversed(files):
        values = merge(values, over)
    return values


def _read_files(path: Path, overlays: tuple[Path, ...] = (), extends: bool = True) -> list[tuple[Path, dict[str, Any]]]:
    """Return (file, its own values) of a YAML file, which ``overlays`` extend, of the one that it extends, etc."""
    if path.resolve() in overlays:
        raise ConfigError(f"{path}: extends itself, by way of {overlays[-1].name}; remove 'extends' from one of them")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise ConfigError(f"{str(path)[:200]}: cannot be read: {error.strerror}") from None
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
            if path.parent.is_dir()
            else []
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except ValueError:  # the name holds NUL
        raise ConfigError(f"{visible(path)}: no such configuration file") from None
    if stat.S_ISDIR(mode):
        inside = f": the configuration of its run is {path / 'config.yaml'}" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"{path}: is a folder; expected a YAML file{inside}")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: is a device or a pipe; expected a YAML file")
    try:
        values = read_yaml_file(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        hint = "; indent with spaces" if "'\\t'" in str(error) else ""
        raise ConfigError(f"{path}: not readable as YAML: {one_line(error)}{hint}") from None
    if values is None:
        raise ConfigError(f"{path}: is empty; configs/ppo/base.yaml shows every key, and quickstart.yaml a whole run")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(values).__name__}")
    parent = values.pop("extends", None)
    if not isinstance(parent, str | None):
        raise ConfigError(f"{path}: extends: expected the name of one file, got {parent!r:.80}")
    named = {"extends": parent} | {f"{place}.extends": name for place, name in _extending(values)}
    for place, name in named.items() if not extends else ():
        if name:
            raise ConfigError(
                f"{path}: {place}={name!r:.60}: the configuration of a run or a team is whole and may name no other "
                "file; remove the key, or give the file itself as the configuration"
            )
    if "pythonpath" in values:
        values["pythonpath"] = _absolute(values["pythonpath"], path.parent)
    return [(path, values), *(_read_files(_extended(path, parent), (*overlays, path.resolve())) if parent else [])]


def _extended(path: Path, parent: str) -> Path:
    """Return the file that ``path`` extends: one beside it, or that of a recipe, whose name has no ending."""
    beside = path.parent / parent
    coming = {} if beside.suffix else recipe_files() | configuration_files()
    return coming[parent] if parent in coming and not beside.exists() else beside


def _with_algorithms(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` in which every algorithm that ``extends`` a recipe has what one policy can have of this.

    What else the recipe says, of sampling and of the whole run, is left out, and listed.

    Raises:
        ConfigError: no recipe has this name.
    """
    for place, name in _extending(values):
        recipes = recipe_files() | configuration_files()
        if not isinstance(name, str) or name not in recipes:
            raise ConfigError(f"{place}.extends: as a recipe {unknown(str(name), recipes)}")
        taken, left = _of_one_policy(read_yaml(recipes[name]))
        tell(f"{place}: what recipe {name} says of the whole run is not taken: {', '.join(left)}")
        key, _, agent = place.removesuffix(".algorithm").partition(".")
        section = values[key][agent] if agent else values[key]
        own = {option: value for option, value in section["algorithm"].items() if option != "extends"}
        changed = section | {"algorithm": merge(taken, own)}
        values = values | {key: values[key] | {agent: changed} if agent else changed}
    return values


def _extending(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the places of agents' algorithms that extend something, with what it is."""
    sections: dict[str, Any] = {"agent_defaults": values.get("agent_defaults")}
    if isinstance(values.get("agents"), dict):
        sections |= {f"agents.{name}": section for name, section in values["agents"].items()}
    own = {f"{p}.algorithm": section.get("algorithm") for p, section in sections.items() if isinstance(section, dict)}
    return [(place, one["extends"]) for place, one in own.items() if isinstance(one, dict) and "extends" in one]


def _of_one_policy(recipe: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what an algorithm can have of the values of a recipe, and the keys of the rest."""
    taken: dict[str, Any] = {key: {} for key in ("advantage", "ppo")}
    left = []
    for key, value in recipe.items():
        for name, inner in value.items() if isinstance(value, dict) and key not in ("recipe", "task") else ():
            if key == "advantage" or (key == "ppo" and name not in NOT_LEARNED):
                taken[key][name] = inner
            elif (key == "training" and name in OF_LEARNER) or (key, name) == ("schedule", "critic_warmup"):
                taken[name] = inner
            elif key in ("ppo", "training", "schedule", "branching"):
                left.append(f"{key}.{name}")
    return taken, [*left, *(key for key in recipe if key in ("task", "protocol", "reward", "agents"))]


def _absolute(folders: Any, root: Path) -> Any:
    """Return the paths of ``folders``, one or a list, which are relative to ``root``. The schema refuses all else."""
    listed = [folders] if isinstance(folders, str) else folders
    if not isinstance(listed, list) or not all(isinstance(folder, str) for folder in listed):
        return folders
    return [str((root / Path(folder).expanduser()).resolve()) for folder in listed]


def merge(under: dict, over: dict, one_source: bool = False) -> dict:
    """Return ``under`` with the values of ``over``, as a file overrides the one that it extends."""
    # a section with another name (task, protocol) replaces the whole section, and so does reward.sources without
    # ``one_source``; options of a game do not stay for another; a model takes the place of a tiny one, and the reverse
    merged = dict(under)
    for chosen, other in (("model", "tiny"), ("tiny", "model")):
        if over.get(chosen) is not None and other not in over:
            merged.pop(other, None)
    for key, value in over.items():
        beneath = merged.get(key)
        if isinstance(value, dict) and isinstance(beneath, dict):
            name = beneath.get("name")
            another = (key == "sources" and not one_source) or (
                key in ("task", "protocol") and value.get("name", name) != name
            )
            if key == "protocol" and value.get("game", beneath.get("game")) != beneath.get("game"):
                beneath = {part: old for part, old in beneath.items() if part != "options"}
            merged[key] = value if another else merge(beneath, value, one_source)
        else:
            merged[key] = value
    return merged


def apply_overrides(values: dict, overrides: Sequence[str]) -> dict:
    """Return ``values`` with the values of ``overrides``, which are ``a.b=c`` with YAML values, without comments.

    ``reward.sources.x=1`` adds a source to those of the run or changes its weight, and ``reward.sources={x: 1}``
    replaces all of them.

    Raises:
        ConfigError: an override cannot be read.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {visible(override):.80}: expected key=value, such as training.learning_rate=1e-4")
        if path.count(".") >= DEEPEST:
            raise ConfigError(f"--set {visible(override):.80}: expected a key of at most {DEEPEST} parts")
        try:
            value: Any = parse_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {visible(override):.80}: the value is not YAML: {one_line(error)}") from None
        for place in (place for place in _DEFAULTS if path.startswith(f"{place}.")):  # perhaps no file names it
            values = merge(_nested(place, _DEFAULTS[place]), values)
        values = merge(values, _nested(path, value), one_source="sources" in path.split(".")[:-1])
    return values


# the options that are mappings and are not empty by default
_DEFAULTS = {"reward.sources": RewardSection().sources, "protocol": {"name": "debate"}}


def _nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``value`` in a mapping for each key of a dotted ``path``."""
    return reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)


def _check_values(values: dict[str, Any], where: str) -> None:
    """Check that ``values`` hold only 64-bit numbers and texts that a file can hold, and not themselves."""
    left: list[tuple[str, Any, int]] = [("", values, 0)]
    seen: set[int] = set()  # YAML's aliases name one value many times
    while left:
        key, value, depth = left.pop()
        at = f"{where}: {key or 'the configuration'}:"
        if isinstance(value, dict | list | tuple | set):
            if depth > DEEPEST:
                raise ConfigError(f"{at[:200]} expected values at most {DEEPEST} levels deep")
            if id(value) in seen:
                continue
            seen.add(id(value))
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            below = f"{key}." if key else ""
            for name, inner in entries:
                left.append((f"{below}{name:.40}" if isinstance(name, str) else f"{below}...", inner, depth + 1))
            left += [(f"a key of {key or 'the file'}", name, depth) for name in value if isinstance(value, dict)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{at} expected a number of at most 64 bits, got one of {value.bit_length()} bits")
        elif isinstance(value, str) and _UNWRITABLE.search(value):
            raise ConfigError(f"{at} expected a text that a file can hold, got {value!r:.80}")


_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
"""The character NUL, which no file name holds, and halves of characters, which no UTF-8 holds."""


def _folder(installed: str, in_checkout: str) -> Path:
    """Return a folder of files: the one inside the installed package, or else the one in the checkout."""
    here = Path(__file__).parents[1]
    return here / installed if (here / installed).is_dir() else here.parent / in_checkout


def recipe_folder() -> Path:
    """Return the folder with the recipes."""
    return _folder("recipe_files", "configs/ppo/recipes")


def recipe_files() -> dict[str, Path]:
    """Return the file of every recipe, by the recipe's name."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml")) if path.stem != "common"}


def configuration_files() -> dict[str, Path]:
    """Return the files of the other configurations, by name: quickstart, smollm2_times, ..."""
    files = sorted(_folder("configurations", "configs/ppo").glob("*.yaml"))
    return {path.stem: path for path in files if path.stem not in ("base", "maporl_common")}
