"""PNG plots of a run, from its ``metrics.jsonl``."""

import re
from pathlib import Path
from typing import Any

PANELS = {
    "accuracy.png": (r"accuracy/(turn_\d+)", "accuracy"),
    "majority.png": (r"majority/(turn_\d+)", "accuracy of the majority vote"),
    "changes.png": (r"change/(\d+_to_\d+/(?:improved|declined))", "share of answers that changed"),
    "finished.png": (r"finished/(turn_\d+)", "share of questions finished at a turn"),
    "reward.png": (r"reward/([^/]+)", "mean reward"),
    "bonus.png": (r"reward/bonus/(.+/turn_\d+)", "mean collaboration bonus"),
    "penalties.png": (r"count/penalty/(\w+/.+/turn_\d+)", "penalties per update"),
    "kl.png": (r"(.+)/objective/kl", "KL to the reference, nats per answer"),
}
"""File -> (which metrics, with the part that names a line; what the axis shows)."""


def plot_run(metrics: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw what was measured over the updates; returns the files. What a run does not have is not drawn.

    Thin lines are the questions trained on, dashed ones with marks the evaluation split, where it was evaluated.
    """
    from matplotlib.figure import Figure  # the object interface: no global figure is left behind

    names = sorted({k for m in metrics for k in m})
    written = []
    for file, (pattern, label) in PANELS.items():
        lines = [(name, match) for name in names if (match := re.fullmatch(f"(eval_)?{pattern}", name))]
        if not lines:
            continue
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        colours: dict[str, str] = {}
        for name, match in sorted(lines, key=lambda line: bool(line[1][1])):
            points = [(m["step"], m[name]) for m in metrics if name in m]
            colour = colours.setdefault(match[2], f"C{len(colours) % 10}")
            legend = match[2].replace("_", " ") + (", held out" if match[1] else "")
            style = {"linestyle": "--", "marker": "o", "markersize": 4} if match[1] else {"linestyle": "-"}
            axes.plot(
                [x for x, _ in points], [y for _, y in points], label=legend, color=colour, linewidth=1.4, **style
            )
        axes.set_xlabel("update")
        axes.set_ylabel(label)
        if file in ("accuracy.png", "majority.png", "finished.png", "changes.png"):
            axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small", ncols=1 + len(lines) // 8)
        figure.savefig(folder / file, dpi=110)
        written.append(folder / file)
    return written
