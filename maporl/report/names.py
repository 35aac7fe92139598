"""What people call a run, its models and its parts: without paths of a cache and without names of modules."""

import re
from typing import Any

from maporl.report.counts import counts_of
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
    agents, game = counts_of(run).agents, counts_of(run).game
    who = listed(agents) if len(agents) <= MOST_NAMED else counted(len(agents), "agent")
    task = f"in the game {game}" if game else f"on {task_of(run)}" if task_of(run) else ""
    return visible(f"{who} {task}".strip()) if who else ""


def task_of(run: Run) -> str:
    """What people call the task; empty where it is not recorded. One of prompts has the name of its file or none."""
    name = run.section("task").get("name") or ""
    return "a data set of prompts" if name in ("prompts", "maporl.tasks.prompts:Prompts") else part_name(name)
