"""Cross-play for people: in sentences, as a table of the report, and as a picture."""

from pathlib import Path
from typing import Any

from maporl.evaluation.crossplay import CrossPlay
from maporl.report.charts import finite
from maporl.report.language import counted, listed, percent

PICTURE = "crossplay.png"


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
    rows = [[_cell(share.value, *share.interval()) for share in row] for row in play.matrix()]
    return {"runs": list(play.runs), "seats": list(play.seats), "cells": rows, "about": how(play)}


def _cell(value: float, low: float, high: float) -> dict[str, float | None]:
    return {"value": finite(value), "low": finite(low), "high": finite(high)}


def plot_crossplay(play: CrossPlay, folder: Path) -> Path:
    """Draw the matrix, with the diagonal framed; returns the file."""
    from matplotlib.figure import Figure  # the object interface: no global figure is left behind

    matrix, size = play.matrix(), len(play.runs)
    figure = Figure(figsize=(3.4 + 1.1 * size, 2.2 + 0.8 * size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow([[100 * cell.value for cell in row] for row in matrix], vmin=0, vmax=100, cmap="Blues")
    for row, cells in enumerate(matrix):
        for column, cell in enumerate(cells):
            low, high = cell.interval()
            text = f"{100 * cell.value:.1f}\n[{100 * low:.0f}, {100 * high:.0f}]"
            colour = "white" if cell.value > 0.6 else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize="small")
        axes.add_patch(_frame(row))
    two = len(play.seats) == 2
    axes.set_xticks(range(size), play.runs, rotation=30, ha="right")
    axes.set_yticks(range(size), play.runs)
    axes.set_xlabel(f"{play.seats[1]} of" if two else "one agent of")
    axes.set_ylabel(f"{play.seats[0]} of" if two else "the other agents of")
    together, mixed = play.self_play().value, play.cross_play().value
    axes.set_title(f"trained together {together:.1%}, mixed {mixed:.1%}", fontsize="medium")
    figure.colorbar(image, label="right in the last turn, %")
    figure.savefig(folder / PICTURE, dpi=110)
    return folder / PICTURE


def _frame(place: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((place - 0.47, place - 0.47), 0.94, 0.94, fill=False, edgecolor="C1", linewidth=2)
