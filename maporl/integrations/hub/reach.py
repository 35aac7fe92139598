"""What the configuration of a team from the hub may name: things on the hub, and nothing of the user's machine.

Such a configuration is untrusted input. It could read the user's files into prompts, send dialogues and API keys to a
server of its author's, load a folder that happens to lie here, or import a module, which runs it. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maporl.config.engines import IN_PYTHON
from maporl.config.imports import is_import
from maporl.config.parse import leaves
from maporl.config.schema import JudgeSection
from maporl.sections import brought

_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")
_FILE = re.compile(r"\.(jsonl?|tar\.gz|tgz|csv|txt|parquet|zip|ya?ml|jinja)$", re.IGNORECASE)
_NAMES = ("model", "tokenizer", "adapter")
_SOURCES = ("source", "eval_source", "encoder")
_SERVERS = ("api", "vllm", "engine_options")


def reach_of(values: Mapping[str, Any], given: Mapping[str, Any], root: Path) -> str:
    """Return the first option with which the author of a configuration could reach out, as ``key=value``, or "".

    Args:
        values: the configuration's plain values, with the user's own in them.
        given: the user's own values among these. They may name whatever the user likes.
        root: the folder with the team's weights, whose folders the configuration may name.
    """
    overrides = dict(leaves(given))
    named = list(code_in(given))
    code = next((pair for pair in code_in(values) if pair not in named), None)
    if code is not None:
        return f"{code[0]}={code[1]!r:.60}"
    for key, value in leaves(values):
        if not (key in overrides and overrides[key] == value) and _reaches_out(key, value, root):
            return f"{key}={value!r:.60}"
    return ""


def code_in(values: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text that could name code of the user's machine, with the dotted key at which it stands.

    Wherever a text has the form ``MODULE:OBJECT`` it is taken for a name, also as a key, because a part that is added
    later may read one there. What an agent's section holds is never imported.
    """
    if isinstance(values, Mapping):
        for key, part in values.items():
            if at or key not in ("agents", "agent_defaults", "output_dir"):
                yield from code_in(key, at or str(key))
                yield from code_in(part, f"{at}.{key}" if at else str(key))
    elif isinstance(values, list | tuple):
        for number, part in enumerate(values):
            yield from code_in(part, f"{at}.{number}")
    elif is_import(values) or (isinstance(values, str) and at.partition(".")[0] == "pythonpath"):
        yield at, values


def _reaches_out(key: str, value: Any, root: Path) -> bool:
    parts = key.split(".")
    first, middle, last = parts[0], parts[1:-1], parts[-1]
    if value is None:
        return False
    if first == "agent_defaults":  # a whole configuration has none
        return True
    if first == "agents" and middle:
        if (middle[1:2] and middle[1] in _SERVERS) or last in _SERVERS:
            return True
        if last == "chat_template":
            return _is_file(value)
        if last == "target_modules":  # PEFT takes a text for a regular expression, and one can be written to never end
            return value != "all-linear" and re.fullmatch(r"[\w.]+", str(value)) is None
        return (last == "engine" and value not in ("transformers", "human", "random", IN_PYTHON)) or (
            last in _NAMES and not _harmless(value, root)
        )
    if first == "task" or (first == "schedule" and "task" in middle):
        if last in _SOURCES:  # a name without an organisation, such as text, would read the files of the present folder
            return not _harmless(value, root) or "/" not in value
        return _looks_like_a_path(value)
    if first == "protocol" and parts[1:2] == ["command"]:  # a program of the author's
        return True
    if first in ("tools", "environments"):  # options name files, addresses and commands
        return "options" in middle
    if first == "reward" and "verifier" in middle:
        return "urls" in middle or (last == "model" and not _harmless(value, root))
    # a regular expression can be written so that it never ends
    known = [getattr(kind, "pattern", None) for kind in (JudgeSection, brought("maporl.methods.sections:ArenaSection"))]
    return first == "reward" and last == "pattern" and value not in known


def _harmless(value: Any, root: Path) -> bool:
    """Whether ``value`` is a name on the hub with no file here, or a folder beside the team's weights."""
    if not isinstance(value, str):
        return False
    named = _ON_THE_HUB.fullmatch(value) is not None and not _FILE.search(value) and ".." not in value
    place = Path(value)
    beside_weights = (
        place.is_absolute()
        and ".." not in place.parts
        and (place.parent == root or (place.parent.parent == root and place.name == "base"))
    )
    return (named and not place.exists()) or beside_weights


def _is_file(template: Any) -> bool:
    """Whether a chat template is the path of a file, as :func:`maporl.team.loading.read_chat_template` takes it."""
    return template != "fallback" and (
        not isinstance(template, str) or "{" not in template or template.endswith(".jinja")
    )


def _looks_like_a_path(value: Any) -> bool:
    if not isinstance(value, str) or any(character.isspace() for character in value):
        return False
    return value.startswith(("/", "~", ".", "file:")) or "\\" in value or "://" in value or bool(_FILE.search(value))
