"""PNG plots of a run, from its ``metrics.jsonl``."""

from pathlib import Path
from typing import Any

PANELS = {
    "accuracy.png": ("accuracy/turn_", "accuracy on the questions trained on", 1),
    "reward.png": ("reward/", "mean reward", 1),
    "kl.png": ("/objective/kl", "KL to the reference, nats per answer", None),
}


def plot_run(metrics: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write accuracy per turn, reward and KL over updates; returns the files."""
    from matplotlib.figure import Figure  # the object interface: no global figure is left behind

    updates = [m for m in metrics if "tokens_per_second" in m]
    written = []
    for name, (pattern, label, depth) in PANELS.items():
        keys = sorted({k for m in updates for k in m if pattern in k and (depth is None or k.count("/") == depth)})
        if not keys:
            continue
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for key in keys:
            points = [(m["step"], m[key]) for m in updates if key in m]
            axes.plot([x for x, _ in points], [y for _, y in points], label=_legend(key), linewidth=1.4)
        axes.set_xlabel("update")
        axes.set_ylabel(label)
        if name == "accuracy.png":
            axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(folder / name, dpi=110)
        written.append(folder / name)
    return written


def _legend(key: str) -> str:
    return key.replace("accuracy/", "").replace("reward/", "").replace("/objective/kl", "").replace("_", " ")
