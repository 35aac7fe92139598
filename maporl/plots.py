"""PNG plots of a run, from its ``metrics.jsonl``."""

import re
from pathlib import Path
from typing import Any

PANELS = {
    "accuracy.png": (r"accuracy/(turn_\d+)", "accuracy on the questions trained on"),
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
    """Draw what was measured over the updates; returns the files. What a run does not have is not drawn."""
    from matplotlib.figure import Figure  # the object interface: no global figure is left behind

    updates = [m for m in metrics if "tokens_per_second" in m]
    names = sorted({k for m in updates for k in m})
    written = []
    for file, (pattern, label) in PANELS.items():
        lines = [(name, match[1]) for name in names if (match := re.fullmatch(pattern, name))]
        if not lines:
            continue
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, legend in lines:
            points = [(m["step"], m[name]) for m in updates if name in m]
            axes.plot([x for x, _ in points], [y for _, y in points], label=legend.replace("_", " "), linewidth=1.4)
        axes.set_xlabel("update")
        axes.set_ylabel(label)
        if file in ("accuracy.png", "majority.png", "finished.png", "changes.png"):
            axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small", ncols=1 + len(lines) // 8)
        figure.savefig(folder / file, dpi=110)
        written.append(folder / file)
    return written
