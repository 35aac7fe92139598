"""What people call a run, its models and its parts: without paths of a cache and without names of modules."""

import re
from typing import Any

from maporl.report.dialogues import game_of
from maporl.report.language import counted, listed
from maporl.report.read import Run
from maporl.text import visible

_CACHED = re.compile(r"[^\s\"']*?\b(?:models|datasets)--([^/\s\"']+)/snapshots/[^/\s\"',]+")
"""A folder in the hub's cache: its group is the name, with ``--`` for the slash."""
_MAIN = re.compile(r"\b__(?:mp_)?main__[.:]")
_IMPORTED = re.compile(
    r"(?:[\w./\\-]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*|(?:[A-Za-z_]\w*\.)+(?:<locals>\.)?[A-Za-z_]\w*"
)
"""``MODULE:OBJECT``, ``FILE.py:OBJECT`` or ``MODULE.OBJECT``."""
_NOBODYS = re.compile(
    r"(runs?|outputs?|out|results?|final|model|checkpoint|tmp\w*|temp\w*|\d[\d\W_tTzZ]*|[0-9a-f]{12,})([-_]?\d+)?",
    re.IGNORECASE,
)
"""Names of folders that nobody has chosen to tell one run from another."""
MOST_NAMED = 3
"""With more agents than this, a title counts them."""


def named(text: str) -> str:
    """``text`` with names of the hub in place of paths of its cache, and without the name of a script's module.

    >>> named("/c/hub/models--org--name/snapshots/0a1b, __main__.Relay")
    'org/name, Relay'
    """
    return _MAIN.sub("", _CACHED.sub(lambda found: found[1].replace("--", "/", 1), text))


def part_name(name: Any) -> str:
    """What people call a task, a protocol or another part that a configuration names.

    >>> part_name("__main__.PlanSolveCheck"), part_name("my.parts:Relay"), part_name("debate")
    ('PlanSolveCheck', 'Relay', 'debate')
    """
    text = named(str(name))
    return re.split(r"[.:]", text)[-1] if _IMPORTED.fullmatch(text) else text


def model_name(name: str) -> str:
    """What people call a model: its name on the hub, or the last folder of its absolute path.

    >>> model_name("org/name"), model_name("/data/models/mine")
    ('org/name', 'mine')
    """
    text = named(name)
    return text.rstrip("/").rsplit("/", 1)[-1] if text.startswith("/") else text


def title_of(run: Run) -> str:
    """The run's name: the one that a person gave its folder, or else what its team and its task say."""
    folder = run.folder.resolve()
    if cached := _CACHED.fullmatch(str(folder)):
        return cached[1].replace("--", "/", 1)
    return folder.name if not _NOBODYS.fullmatch(folder.name) else subject(run) or folder.name


def subject(run: Run) -> str:
    """Who does what, such as "ann and bob on toy_sum". Empty where the run does not say it."""
    agents = agents_of(run)
    who = listed(agents) if len(agents) <= MOST_NAMED else counted(len(agents), "agent")
    game = game_of(run.dialogues[0].dialogue) if run.dialogues else None
    task = part_name(run.section("task").get("name") or "")
    if not who:
        return ""
    if game:
        return f"{who} in the game {game}"
    return visible(f"{who} on {'a data set of prompts' if is_prompts(run) else task}" if task else who)


def agents_of(run: Run) -> list[str]:
    """The names of the agents: those of the configuration, or else of those who spoke."""
    return list(run.agents()) or sorted({u.agent for one in run.dialogues for u in one.dialogue.utterances})


def is_prompts(run: Run) -> bool:
    """Whether the task is a data set of prompts, from a file or from Python."""
    return run.section("task").get("name") in ("prompts", "maporl.tasks.prompts:Prompts")
