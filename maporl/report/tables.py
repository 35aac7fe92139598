"""The tables of a page: who knows what, what talking is worth, when agents listen, and cross-play."""

from typing import Any

from maporl.evaluation.metrics import numbers_of
from maporl.report.charts import finite
from maporl.report.counts import Counts, counts_of
from maporl.report.findings import said
from maporl.report.read import Run

NONE = "\u2013"
STATES = {False: "wrong, shown a right answer", True: "right, shown a wrong answer"}


def tables(run: Run) -> list[dict[str, Any]]:
    """The tables that a run has something for, each with its ``title``, what it is ``about``, ``columns`` and
    ``rows``."""
    c = counts_of(run)
    made = [] if c.game else [_knowledge(c), _talking(c), _listening(c)]
    names = ("title", "about", "columns", "rows")
    return [dict(zip(names, table, strict=True)) for table in made if table[-1]]


Table = tuple[str, str, list[str], list[list[str]]]


def _knowledge(c: Counts) -> Table:
    kinds = sorted({kind for own in c.known.values() for kind in own})
    return (
        "Who knows what?",
        "Share of first answers that are right, before agents hear each other, by the kind of the question. Held-out "
        "questions, after training.",
        ["agent", *kinds],
        [[agent, *(_share(own.get(kind)) for kind in kinds)] for agent, own in c.known.items()],
    )


def _talking(c: Counts) -> Table:
    rows = []
    if c.talking is not None and c.best is not None:
        rows = [
            ["at least one agent, first turn", f"{c.anybody(0):.1%}"],
            ["at least one agent, last turn", f"{c.anybody(-1):.1%}"],
            [f"all agents in the last turn minus {c.best[0]}, the best, in its first, in points", c.best[1].brief()],
        ]
    about = "What talking is worth beside what one agent alone could do. Held-out questions, after training."
    return "Does talking help?", about, ["who", "right, with 95% intervals"], rows


def _listening(c: Counts) -> Table:
    return (
        "When do they listen?",
        "How often the next answer is right of an agent that was wrong and was shown a right answer, and of one that "
        "was right and was shown a wrong one. Held-out questions; the cases are those after training.",
        ["agent", "it was", "cases", "then right, before training", "then right, after training"],
        [
            [agent, STATES[was], str(len(now["after"])), _share(now.get("before")), _share(now["after"])]
            for (agent, was), now in sorted(c.listened.items())
            if "after" in now
        ],
    )


def _share(right: list[bool] | None) -> str:
    return f"{sum(right) / len(right):.1%}" if right else NONE


def crossplay(play: Any) -> dict[str, Any]:
    """The matrix of a :class:`maporl.CrossPlay`, as values that JSON can hold."""
    rows = [[{name: finite(n) for name, n in numbers_of(share).items()} for share in row] for row in play.matrix()]
    return {"runs": list(play.runs), "seats": list(play.seats), "cells": rows, "about": said("cells", play)}
