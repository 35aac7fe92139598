"""What the first answer learns from talking: on-policy distillation inside the team of the quickstart.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py --seeds 0 1 2 3 4 --output benchmarks/results/distillation.json

Each agent of the quickstart knows one of two skills, so its first answer is right on half of the questions, and by
listening it becomes right on nearly all. ``none`` is the quickstart at a constant rate, and ``dialogue`` adds
``reward.distill``: the first answer earns, for each token, what the same policy thinks of it once it was shown another
dialogue on the question. Each question then has two dialogues, and ``none, in pairs`` has too. ``longer`` arms have
twice the updates. In ``none, then SFT`` the team of ``none`` answers all training questions once more, and TRL's SFT
trainer teaches each agent its final answers that are right: as answers to the first prompt, and to the last one.

What was expected before the first run (2026-11-26): without distillation the first turn stays at 50%; with it it rises
by 10 points or more, and the final turn loses at most 3. Before the first run with SFT (2026-11-26): it raises the
first turn by more than distillation does, because the right final answers of the training questions are nearly all
there, and the final turn loses at most 3 points.

Prints, and writes after each run, the percent of right answers of the first and the final turn on held-out questions,
and the paired differences to ``none`` of the same length.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from learning import T95
from quickstart import CONSTANT_RATE, QUICKSTART
from staleness import train_arms

from maporl.evaluation.metrics import Evaluation
from maporl.loops.builder import Builder, said
from maporl.loops.rows import Row
from maporl.report.read import read_run
from maporl.runs.build import build_trainer
from maporl.runs.train import train
from maporl.types import Dialogue
from maporl.validation.load import load

PAIRS = {"branching.group": 2, "training.per_device_train_batch_size": 64}
"""Half as many questions an update, each in two dialogues, of which each teaches the other."""
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, in pairs": PAIRS,
    "dialogue": PAIRS | {"reward.distill": {"weight": 0.1}},
    "dialogue, stronger": PAIRS | {"reward.distill": {"weight": 0.5}},
    "none, longer": PAIRS | {"updates": 160},
    "dialogue, longer": PAIRS | {"reward.distill": {"weight": 0.1}, "updates": 160},
    "none, then SFT": {},
}
AGAINST = {
    "dialogue": "none, in pairs",
    "dialogue, stronger": "none, in pairs",
    "dialogue, longer": "none, longer",
}
TAUGHT = {
    "reward": {"rules": ["own"]},
    "warm_start": {"steps": 0},
    "loop": {
        "questions": 1600,
        "stages": [
            {
                "train": "sft",
                "build": "distillation:FinalAnswers",
                "epochs": 4,
                "batch_size": 64,
                "learning_rate": 1e-3,
            }
        ],
    },
}


@dataclass(frozen=True)
class FinalAnswers(Builder):
    """Each agent's right final answers, as answers to its first prompt and to its last one."""

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        prompts = {(*row.place[:2], row.agent): row.prompt_ids for row, _ in said(dialogues, turn=0)}
        right = [row for row, _ in said(dialogues, turn=1) if row.value > 0.5]
        first = [
            replace(row, prompt_ids=prompts[(*row.place[:2], row.agent)], place=(*row.place[:2], row.place[2] - 2))
            for row in right
        ]
        return [*first, *right]


def measured(seed: int, sets: dict[str, Any], folder: Path, initial: Path, teach: bool = False) -> dict[str, Any]:
    """Train the quickstart with the overrides ``sets``, and return what it ended with.

    ``teach`` says whether SFT follows.
    """
    steps = {"training.save_steps": 0, "training.eval_steps": 20}
    sets = {"seed": seed, "output_dir": str(folder), **steps, **CONSTANT_RATE, **sets}
    if initial.is_dir():
        shutil.copytree(initial, folder / "initial")
    trainer = build_trainer(load(QUICKSTART, [f"{key}={json.dumps(value)}" for key, value in sets.items()]), quiet=True)
    if not initial.is_dir():
        shutil.copytree(folder / "initial", initial)
    trainer.train()
    if teach:
        return taught(folder)
    assert trainer.after is not None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [round(100 * line["eval_accuracy/turn_1"], 1) for line in lines if "eval_accuracy/turn_1" in line]
    return ended(trainer.after) | {"first turn every 20": curve}


def ended(evaluation: Evaluation) -> dict[str, Any]:
    """Return the percent of right answers of both turns."""
    first, final = (100 * turn.team.count / turn.team.total for turn in evaluation.turns)
    return {"first turn": first, "final turn": final}


def taught(run: Path) -> dict[str, Any]:
    """Teach the team of a run by SFT what its agents said in the end, and return what it ends with."""
    folder = run.parent / "taught"
    agents = {name: {"tiny": None, "model": str(run / "final" / name)} for name in ("ann", "bob")}
    values = {**TAUGHT, "agents": agents, "output_dir": str(folder), "pythonpath": [str(Path(__file__).parent)]}
    train(load(QUICKSTART, [f"{key}={json.dumps(value)}" for key, value in values.items()]), resume=False, quiet=True)
    after = read_run(folder).after
    assert after is not None
    return ended(after)


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

    def measure(name: str, seed: int, folder: Path, initial: Path) -> dict[str, Any]:
        return measured(seed, ARMS[name], folder, initial, teach="SFT" in name)

    train_arms(options, measure, differences, {})


if __name__ == "__main__":
    main()
