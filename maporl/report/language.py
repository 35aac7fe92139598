"""Words and numbers for sentences, and what people call a run's models and its parts."""

import re
from collections.abc import Sequence
from typing import Any

from maporl.evaluation.metrics import Share
from maporl.report.read import Run


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "update"), counted(20, "reply"), counted(3, "game")
    ('1 update', '20 replies', '3 games')
    """
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def part(number: int, total: int, noun: str) -> str:
    """Some of all things, and their share.

    >>> part(2, 10, "question")
    '2 of 10 questions (20.0%)'
    """
    return f"{number} of {counted(total, noun)} ({number / total:.1%})"


def few_updates(number: int) -> str:
    """What follows "the first" or "the last".

    >>> few_updates(1), few_updates(3)
    ('update', '3 updates')
    """
    return "update" if number == 1 else counted(number, "update")


def listed(names: Sequence[str]) -> str:
    """Names with commas and an "and".

    >>> listed(["a", "b", "c"]), listed(["a"]), listed([])
    ('a, b and c', 'a', '')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def percent(share: Share) -> str:
    """A share with its 95% interval.

    >>> percent(Share(8, 10))
    '80.0% (49.0 to 94.3%)'
    """
    return f"{share.value:.1%} ({interval_of(share)})"


def interval_of(share: Share) -> str:
    """A share's 95% interval."""
    low, high = share.interval()
    return f"{100 * low:.1f} to {high:.1%}"


CACHED = re.compile(r"[^\s\"']*?\b(?:models|datasets)--([^/\s\"']+)/snapshots/[^/\s\"',]+")
"""A folder in the hub's cache: its group is the name, with ``--`` for the slash."""
_MAIN = re.compile(r"\b__(?:mp_)?main__[.:]")
_IMPORTED = re.compile(
    r"(?:[\w./\\-]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*|(?:[A-Za-z_]\w*\.)+(?:<locals>\.)?[A-Za-z_]\w*"
)
"""``MODULE:OBJECT``, ``FILE.py:OBJECT`` or ``MODULE.OBJECT``."""


def named(text: str) -> str:
    """``text`` with names of the hub in place of paths of its cache, and without the name of a script's module.

    >>> named("/c/hub/models--org--name/snapshots/0a1b, __main__.Relay")
    'org/name, Relay'
    """
    return _MAIN.sub("", CACHED.sub(lambda found: found[1].replace("--", "/", 1), text))


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


def task_of(run: Run) -> str:
    """What people call the task; empty where it is not recorded. One of prompts has the name of its file or none."""
    name = run.section("task").get("name") or ""
    return "a data set of prompts" if name in ("prompts", "maporl.tasks.prompts:Prompts") else part_name(name)
