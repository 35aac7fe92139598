"""Cross-play for people: in sentences, and as a table of the report."""

from typing import Any

from maporl.evaluation.crossplay import CrossPlay
from maporl.evaluation.metrics import numbers_of
from maporl.report.charts import finite
from maporl.report.language import counted, listed, percent


def told(play: CrossPlay) -> str:
    """What cross-play found, in sentences."""
    gap = play.gap()
    verdict = {
        1: "So a part of what the agents learned works with their own partners only.",
        0: "The interval contains 0, so no dependence on the own partners is seen.",
        -1: "So the agents do not depend on their own partners: teams of strangers are even better.",
    }[gap.sign]
    apart = ""
    if play.left_out:
        apart = (
            f" {counted(play.left_out, 'held-out question')} of {play.runs[0]} were left out, because another run was "
            "trained on them."
        )
    return (
        f"Teams that trained together are right {percent(play.self_play())} of the time, and teams whose agents come "
        f"from different runs {percent(play.cross_play())}, on {counted(play.questions, 'question')}. Trained together "
        f"minus mixed: {gap.points()}. {play.proves_nothing() or verdict}{apart}"
    )


def how(play: CrossPlay) -> str:
    """What the rows and columns of the matrix are, and which teams the means are over."""
    mixed = counted(sum(not team.self_play for team in play.teams), "mixed team")
    if len(play.seats) == 2:
        cells = f"A row has {play.seats[0]} of one run, and a column has {play.seats[1]} of one run."
    else:
        cells = (
            f"A row has the agents {listed(play.seats)} of one run. Off the diagonal, one of them comes from the "
            "column's run; the number is the mean over which one."
        )
    return f"{cells} The diagonal has the teams that trained together. The mean of the others is over {mixed}."


def section(play: CrossPlay) -> dict[str, Any]:
    """The table of the report, as values that JSON can hold."""
    rows = [[{name: finite(n) for name, n in numbers_of(share).items()} for share in row] for row in play.matrix()]
    return {"runs": list(play.runs), "seats": list(play.seats), "cells": rows, "about": how(play)}
