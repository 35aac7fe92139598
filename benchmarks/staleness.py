"""What the quickstart ends at if its answers are some updates old, with and without importance weights.

    OMP_NUM_THREADS=1 python benchmarks/staleness.py --seeds 0 1 2 3 4 --age 2 --output
    benchmarks/results/staleness.json

In a run with ``training.async_depth: N`` answers are at most N updates older than the weights that they train. Here
they are all exactly N old, which is the worst case and can be repeated to the bit: an engine keeps copies of the last
weights, and plays training dialogues with the oldest. Evaluations have the newest. Each seed is trained with answers
that are not old, and with old ones in each mode of ``engine_tis_cap: 2.0`` and without it. Prints, and writes after
each run, the percent of right answers in the final turn. Runs that the file has already are not made again.
"""

import argparse
import copy
import json
import statistics
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from quickstart import QUICKSTART, about

from maporl.engines.text import TextEngine
from maporl.runs.build import build_trainer
from maporl.validation.load import load
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.request import TokenRequest


class OldWeights(OwnWeights):
    """Answers with weights that are ``age`` updates old while ``old`` is set, and with the newest otherwise."""

    remote = True

    def __init__(self, policies, age: int, batch_size: int):
        copies = {name: copy.copy(policy) for name, policy in policies.items()}
        for own in copies.values():
            own.model = copy.deepcopy(own.model)
        super().__init__(copies, batch_size)
        self.trained = policies
        self.kept: dict[str, deque] = {name: deque(maxlen=age + 1) for name in policies}
        self.old = False

    def submit(self, requests: Sequence[TokenRequest]) -> list[Ready[Sampled]]:
        """Sample, and say how many updates the weights had had."""
        versions = {}
        for name, own in self.policies.items():
            versions[name], weights = self.kept[name][0 if self.old else -1]
            own.model.load_state_dict(weights)
        self.release()
        completions = super().submit(requests)
        for request, completion in zip(requests, completions, strict=True):
            completion.value.version = versions[request.policy]
        return completions

    def sync(self, policy: str, version: int) -> None:
        """Keep a copy of the present weights."""
        weights = {name: value.detach().clone() for name, value in self.trained[policy].model.state_dict().items()}
        self.kept[policy].append((version, weights))


MODES = ("token_truncate", "token_mask", "sequence_mask")


def final_turn(seed: int, age: int, mode: str | None, updates: int, folder: Path) -> float:
    """Train the quickstart, and return the percent of right answers in the final turn on held-out questions."""
    sets = {
        "seed": seed,
        "output_dir": str(folder),
        "updates": updates,
        "training.save_steps": 0,
        "dialogues_logged": 1,
    }
    if mode is not None:
        sets |= {"ppo.engine_tis_cap": 2.0, "ppo.engine_tis_mode": mode}
    config = load(QUICKSTART, [f"{key}={json.dumps(value)}" for key, value in sets.items()])
    trainer = build_trainer(config, quiet=True)
    engine = OldWeights(trainer.team.policies, age, config.ppo.batch_rows)
    trainer.engines["transformers"] = TextEngine(trainer.team.policies, engine, config.ppo.response_length)
    play = trainer.collector.collect

    def collect(batch) -> None:
        engine.old = True
        play(batch)
        engine.old = False
        ages = [batch.number - 1 - u.version for d in batch.dialogues for u in d.utterances]
        assert set(ages) == {min(age, batch.number - 1)}, set(ages)

    trainer.collector.collect = collect  # type: ignore[method-assign]
    trainer.train()
    assert trainer.after is not None
    right = trainer.after.turns[-1].team
    return 100 * right.count / right.total


def main() -> None:
    """Train all arms of all seeds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--age", type=int, default=2)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", help="names of arms. By default all")
    options = parser.parse_args()
    arms: dict[str, tuple[int, str | None]] = {"age 0": (0, None), f"age {options.age}": (options.age, None)}
    arms |= {f"age {options.age}, {mode}": (options.age, mode) for mode in MODES}
    arms = {name: own for name, own in arms.items() if options.arms is None or name in options.arms}
    known = json.loads(options.output.read_text())["final turn"] if options.output.exists() else {}
    found = {name: {int(seed): value for seed, value in own.items()} for name, own in known.items()}
    for seed in options.seeds:
        for name, (age, mode) in arms.items():
            if seed not in found.setdefault(name, {}):
                with tempfile.TemporaryDirectory() as folder:
                    found[name][seed] = final_turn(seed, age, mode, options.updates, Path(folder) / "run")
                torch.manual_seed(0)
                print(json.dumps({"seed": seed, "arm": name, "final turn": found[name][seed]}), flush=True)
            report = {**about(), "updates": options.updates, "final turn": found, "against age 0": differences(found)}
            options.output.write_text(json.dumps(report, indent=1) + "\n")


def differences(found: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    """Return for each arm the mean difference to age 0 over seeds, and half of its 95% interval by Student's t."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    table = {}
    for name, own in found.items():
        apart = [value - found["age 0"][seed] for seed, value in own.items() if seed in found.get("age 0", {})]
        if name != "age 0" and len(apart) > 1:
            half = t[len(apart)] * statistics.stdev(apart) / len(apart) ** 0.5
            table[name] = {"mean": round(statistics.mean(apart), 2), "half interval": round(half, 2)}
    return table


if __name__ == "__main__":
    main()
