"""PNG pictures of a run, drawn from its ``metrics.jsonl``."""

from pathlib import Path
from typing import Any

from maporl.report.metric_panels import ROWS, Panel, lines_of


def plot_run(metrics: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the pictures that the run has numbers for; returns their files.

    Thin lines are the training questions. Dashed lines with marks are the held-out questions, where they were
    evaluated.
    """
    names = {name for record in metrics for name in record}
    pictures = [(panel, *panel.picture) for panel in ROWS if panel.picture is not None]
    return [folder / file for panel, file, axis in pictures if _plot(metrics, names, panel, axis, folder / file)]


def _plot(metrics: list[dict[str, Any]], names: set[str], panel: Panel, axis: str, file: Path) -> bool:
    """Draw one picture; False where the run has none of its metrics."""
    from matplotlib.figure import Figure  # the object interface: no global figure is left behind

    lines = lines_of(panel, names)
    if not lines:
        return False
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for line in lines:
        points = [(m["step"], m[line.name]) for m in metrics if line.name in m]
        colour = colours.setdefault(line.label, f"C{len(colours) % 10}")
        label = line.label + (", held out" if line.held_out else "")
        style = {"linestyle": "--", "marker": "o", "markersize": 4} if line.held_out else {"linestyle": "-"}
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=colour, linewidth=1.4, **style)
    axes.set_xlabel("update")
    axes.set_ylabel(axis)
    if ROWS[panel][0].unit == "share":
        axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(lines) // 8)
    figure.savefig(file, dpi=110)
    return True
