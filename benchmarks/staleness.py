"""What a team loses if its answers are some updates old, whose age it is, and what helps.

    OMP_NUM_THREADS=1 python benchmarks/staleness.py --arms fresh old --seeds 0 1 2 3 4 --output
    benchmarks/results/staleness.json

In a run with ``training.async_depth: N`` answers are at most N updates older than the weights that they train. Here
they are all exactly ``--age`` old, which is the worst case and can be repeated to the bit: an engine keeps copies of
the last weights, and plays training dialogues with the oldest. Evaluations have the newest.

``fresh`` has answers of the present weights and ``old`` old ones, both without importance weights. In ``own old`` and
``partner old``, half of the dialogues train one agent and the other half the other agent; the answers of one side are
old, and those of the other side are fresh (twice as many dialogues, so that each policy learns from as many answers).
In ``one fresh`` and ``one old`` one agent learns and the other is frozen. ``half`` and ``third`` take smaller steps, as
many more of them; all other arms change the options that :data:`ARMS` lists.

What was expected before the first run of these arms (2026-11-26): that it is the step, so that a third of the rate
loses at most 3 points; that a policy's own old answers cost most of the loss, and a partner's at most 5 points; that a
ratio to the sampler helps (``to sampler``, ``dis``), because tokens that have moved since they were sampled are pushed
no further, and that ``narrow dis`` loses at most 5 points. Before the first run in two more worlds,
``configs/ppo/claims/cory.yaml`` (a critic, one policy for both agents) and one of groups without a critic (2026-11-26):
that old answers lose more than 3 points there too, and with a ratio to the sampler and half the steps at most 3. The
second was to be ``voters.yaml``, whose teams end at 10 to 20% of held-out sums, so that no loss could show.
``grouped.yaml`` took its place after seed 0 of ``fresh`` and ``old`` had been seen.

Prints, and writes after each run, the percent of right answers in the final turn of held-out questions, at the end and
every 20 updates, the mean distance between what sampled and what is trained in nats a token (``kl``), and the paired
differences to the fresh arm of the same steps. Runs that the file has already are not made again.
"""

import argparse
import copy
import json
import shutil
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learning import T95
from quickstart import CONSTANT_RATE, QUICKSTART, about

from maporl.engines.text import TextEngine
from maporl.runs.build import build_trainer
from maporl.validation.load import load
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.request import TokenRequest


@dataclass(frozen=True)
class Arm:
    """A way to train: whose answers are old, and the options that differ.

    ``against`` is the arm with which it is compared. ``slower`` divides the learning rates, and multiplies the updates.
    """

    own: bool = True
    partner: bool = True
    sets: dict[str, Any] = field(default_factory=dict)
    against: str = "fresh"
    slower: int = 1


ONE = {"schedule.freeze": [{"agent": "bob", "first": 1, "last": 1000000}]}
TO_SAMPLER = {"ppo.ratio_to": "sampler"}
DIS = {**TO_SAMPLER, "ppo.objective": "dis"}
ARMS = {
    "fresh": Arm(False, False),
    "old": Arm(),
    "own old": Arm(True, False),
    "partner old": Arm(False, True),
    "one fresh": Arm(False, False, ONE),
    "one old": Arm(True, False, ONE, "one fresh"),
    "half fresh": Arm(False, False, slower=2),
    "half old": Arm(slower=2, against="half fresh"),
    "third fresh": Arm(False, False, slower=3),
    "third old": Arm(slower=3, against="third fresh"),
    **{
        f"old, {mode}": Arm(sets={"ppo.engine_tis_cap": 2.0, "ppo.engine_tis_mode": mode})
        for mode in ("token_truncate", "token_mask", "sequence_mask")
    },
    "old, to sampler": Arm(sets=TO_SAMPLER),
    "half old, to sampler": Arm(sets=TO_SAMPLER, slower=2),
    "fresh, dis": Arm(False, False, {**DIS, "ppo.cliprange": 0.8, "ppo.cliprange_high": 3.0}),
    "old, dis": Arm(sets={**DIS, "ppo.cliprange": 0.8, "ppo.cliprange_high": 3.0}),
    "old, narrow dis": Arm(sets={**DIS, "ppo.cliprange": 0.2, "ppo.cliprange_high": 0.28}),
    "old, more KL": Arm(sets={"ppo.kl_coef": 0.1}),
}


class OldWeights(OwnWeights):
    """Answers of training dialogues with weights that are some updates old, and others with the newest.

    ``ages(policy, prompt)`` is the age of the weights with which a policy answers in the dialogues of a question.
    """

    remote = True

    def __init__(self, policies, age: int, batch_size: int):
        copies = {name: copy.copy(policy) for name, policy in policies.items()}
        for own in copies.values():
            own.model = copy.deepcopy(own.model)
        super().__init__(copies, batch_size)
        self.trained = policies
        self.kept: dict[str, deque] = {name: deque(maxlen=age + 1) for name in policies}
        self.is_old = None

    def submit(self, requests: Sequence[TokenRequest]) -> list[Ready[Sampled]]:
        """Sample, and say how many updates the weights had had."""
        answers: dict[int, Ready[Sampled]] = {}
        for old in (False, True):
            part = [n for n, request in enumerate(requests) if self._is_old(request) == old]
            if not part:
                continue
            versions = {}
            for name, own in self.policies.items():
                versions[name], weights = self.kept[name][0 if old else -1]
                own.model.load_state_dict(weights)
            self.release()
            for number, answer in zip(part, super().submit([requests[n] for n in part]), strict=True):
                answer.value.version = versions[requests[number].policy]
                answers[number] = answer
        return [answers[number] for number in range(len(requests))]

    def _is_old(self, request: TokenRequest) -> bool:
        if self.is_old is None:
            return False
        assert request.key is not None
        return self.is_old(request.policy, int(request.key[2]))

    def sync(self, policy: str, version: int) -> None:
        """Keep a copy of the present weights."""
        weights = {name: value.detach().clone() for name, value in self.trained[policy].model.state_dict().items()}
        self.kept[policy].append((version, weights))


def measured(world: str, arm: Arm, seed: int, age: int, folder: Path, initial: Path) -> dict[str, Any]:
    """Train a configuration, and return the percent of right answers in the final turn on held-out questions.

    ``initial`` is where the warm-started weights of the seed are kept from one run to the next.
    """
    apart = arm.own != arm.partner and "schedule.freeze" not in arm.sets
    plain = load(world)
    rate, value_rate = plain.training.learning_rate, plain.training.value_learning_rate
    sets = {
        "seed": seed,
        "output_dir": str(folder),
        "updates": plain.updates * arm.slower,
        "training.save_steps": 0,
        "training.eval_steps": 20 * arm.slower,
        "training.learning_rate": rate / arm.slower,
        "training.value_learning_rate": None if value_rate is None else value_rate / arm.slower,
        "training.gradient_accumulation_steps": 2 if apart else 1,
        "dialogues_logged": 1,
        **CONSTANT_RATE,
        **arm.sets,
    }
    if initial.is_dir():
        shutil.copytree(initial, folder / "initial")
    config = load(world, [f"{key}={json.dumps(value)}" for key, value in sets.items()])
    trainer = build_trainer(config, quiet=True)
    if not initial.is_dir():
        shutil.copytree(folder / "initial", initial)
    agents = list(trainer.team.policies)
    engine = OldWeights(trainer.team.policies, age, config.ppo.batch_rows)
    trainer.engines["transformers"] = TextEngine(trainer.team.policies, engine, config.ppo.response_length)
    play = trainer.collector.collect

    def learns(policy: str, prompt: int) -> bool:
        return not apart or agents[prompt % 2] == policy

    def collect(batch) -> None:
        engine.is_old = lambda policy, prompt: arm.own if learns(policy, prompt) else arm.partner
        play(batch)
        engine.is_old = None
        for dialogue in batch.dialogues:
            for spoken in dialogue.utterances:
                spoken.trainable = spoken.trainable and learns(spoken.policy, dialogue.prompt)
                if spoken.trainable and spoken.version:
                    assert batch.number - 1 - spoken.version == (min(age, batch.number - 1) if arm.own else 0)

    trainer.collector.collect = collect  # type: ignore[method-assign]
    trainer.train()
    assert trainer.after is not None
    right = trainer.after.turns[-1].team
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last, gap = f"eval_accuracy/turn_{len(trainer.after.turns)}", f"{agents[0]}/policy/engine_gap"
    curve = [line[last] for line in lines if last in line]
    gaps = [line[gap] for line in lines if gap in line]
    return {
        "final turn": 100 * right.count / right.total,
        "every 20": [round(100 * value, 1) for value in curve],
        "kl": round(statistics.mean(gaps[len(gaps) // 2 :]), 3),
    }


def main() -> None:
    """Train all arms of all seeds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--age", type=int, default=2)
    parser.add_argument(
        "--config", default=QUICKSTART, help="the world; the frozen agent of an arm is that of the quickstart"
    )
    parser.add_argument("--initial", type=Path, help="where warm-started weights are kept; by default nowhere")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    options = parser.parse_args()

    def measure(name: str, seed: int, folder: Path, initial: Path) -> dict[str, Any]:
        return measured(options.config, ARMS[name], seed, options.age, folder, initial)

    train_arms(options, measure, differences, {"world": options.config, "age": options.age})


def train_arms(
    options: argparse.Namespace,
    measure: Callable[[str, int, Path, Path], dict[str, Any]],
    summary: Callable[[dict[str, dict[str, Any]]], dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """Train each arm of ``options.arms`` with each seed, unless ``options.output`` has it, and write all after each.

    ``measure(arm, seed, folder, initial)`` trains a run in a new folder and returns its figures; ``summary`` compares
    all figures, and ``facts`` stand in the file too.
    """
    found: dict[str, dict[str, Any]] = json.loads(options.output.read_text())["runs"] if options.output.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.arms:
            for seed in options.seeds:
                if str(seed) in found.setdefault(name, {}):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    kept = (options.initial or Path(scratch)) / str(seed)
                    found[name][str(seed)] = measure(name, seed, Path(folder) / "run", kept)
                print(json.dumps({"arm": name, "seed": seed, **found[name][str(seed)]}), flush=True)
                report = {**about(), **facts, "runs": found, "differences": summary(found)}
                options.output.write_text(json.dumps(report, indent=1) + "\n")


def differences(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each arm its mean and the mean paired difference, with half of its 95% interval by Student's t."""
    table: dict[str, dict[str, Any]] = {}
    for name, own in found.items():
        against = found.get(ARMS[name].against, {})
        apart = [value["final turn"] - against[seed]["final turn"] for seed, value in own.items() if seed in against]
        table[name] = {"mean": round(statistics.mean(value["final turn"] for value in own.values()), 1)}
        if name != ARMS[name].against and len(apart) > 1:
            half = T95[len(apart)] * statistics.stdev(apart) / len(apart) ** 0.5
            table[name] |= {"difference": round(statistics.mean(apart), 1), "half interval": round(half, 1)}
    return table


if __name__ == "__main__":
    main()
