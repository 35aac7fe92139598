"""What the first answer learns from talking: on-policy distillation inside the team of the quickstart.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py --seeds 0 1 2 3 4 --output benchmarks/results/distillation.json

Each agent of the quickstart knows one of two skills, so its first answer is right on half of the questions, and by
listening it becomes right on nearly all. ``none`` is the quickstart, and ``dialogue`` adds ``reward.distill``: the
first answer earns, for each token, what the same policy thinks of it once it was shown the dialogue. ``longer`` arms
have twice the updates.

What was expected before the first run (2026-11-26): without distillation the first turn stays at 50%; with it it rises
by 10 points or more, and the final turn loses at most 3.

Prints, and writes after each run, the percent of right answers of the first and the final turn on held-out questions,
and the paired differences to ``none`` of the same length.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from learning import T95
from quickstart import QUICKSTART
from staleness import train_arms

from maporl.runs.build import build_trainer
from maporl.validation.load import load

ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "dialogue": {"reward.distill": {"weight": 0.1}},
    "dialogue, stronger": {"reward.distill": {"weight": 0.5}},
    "none, longer": {"updates": 160},
    "dialogue, longer": {"reward.distill": {"weight": 0.1}, "updates": 160},
}
AGAINST = {"dialogue, longer": "none, longer"}


def measured(seed: int, sets: dict[str, Any], folder: Path, initial: Path) -> dict[str, Any]:
    """Train the quickstart with the overrides ``sets``, and return what it ended with."""
    sets = {"seed": seed, "output_dir": str(folder), "training.save_steps": 0, "training.eval_steps": 20, **sets}
    if initial.is_dir():
        shutil.copytree(initial, folder / "initial")
    trainer = build_trainer(load(QUICKSTART, [f"{key}={json.dumps(value)}" for key, value in sets.items()]), quiet=True)
    if not initial.is_dir():
        shutil.copytree(folder / "initial", initial)
    trainer.train()
    assert trainer.after is not None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [round(100 * line["eval_accuracy/turn_1"], 1) for line in lines if "eval_accuracy/turn_1" in line]
    first, final = (100 * turn.team.count / turn.team.total for turn in trainer.after.turns)
    return {"first turn": first, "final turn": final, "first turn every 20": curve}


def differences(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return for each arm and turn the mean and the paired difference, with half of its 95% interval."""
    table: dict[str, Any] = {}
    for name, own in found.items():
        against = found.get(AGAINST.get(name, "none"), {})
        for turn in ("first turn", "final turn"):
            row = {"mean": round(statistics.mean(one[turn] for one in own.values()), 1)}
            apart = [one[turn] - against[seed][turn] for seed, one in own.items() if seed in against]
            if len(apart) > 1 and against is not own:
                half = T95[len(apart)] * statistics.stdev(apart) / len(apart) ** 0.5
                row |= {"difference": round(statistics.mean(apart), 1), "half interval": round(half, 1)}
            table[f"{name}: {turn}"] = row
    return table


def main() -> None:
    """Train all arms of all seeds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--initial", type=Path, help="where warm-started weights are kept; by default nowhere")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    train_arms(options, lambda name, *where: measured(where[0], ARMS[name], *where[1:]), differences, {})


if __name__ == "__main__":
    main()
