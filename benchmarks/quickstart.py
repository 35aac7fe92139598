"""Measure what two specialists gain by talking, over several seeds, and write it down as JSON.

    python benchmarks/quickstart.py --seeds 0 1 2 3 4 --output benchmarks/results/quickstart.json
    python benchmarks/quickstart.py --seeds 0 --set training.learning_rate=6.0e-4 --output narrow.json
    python benchmarks/quickstart.py --config configs/ppo/smollm2_listen.yaml --seeds 0 1 2 --output real.json \
        --set agents.ann.model=DIR --set agents.bob.model=DIR

Each seed of the quickstart is trained twice, one run after the other: with both agents learning, and with one of them
frozen (bob for even seeds, ann for odd ones). ``maporl eval`` then lets each agent of the first run answer alone, and
by a majority vote over as many sampled tokens as the dialogues have. The configuration of the real model, which takes
longer, is only trained once a seed, with both agents learning.

The file holds the commit, the machine, the date and, for each run, its accuracies in percent, its seconds and the CPU
seconds of its process. The command ends with status 1 if a seed misses an expectation of its configuration.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from learning import Run, train

ROOT = Path(__file__).parents[1]
QUICKSTART, REAL_MODEL = "configs/ppo/quickstart.yaml", "configs/ppo/smollm2_listen.yaml"
EXPECTED = {
    QUICKSTART: {
        "first turn": (47.0, 53.0),
        "final turn": (90.0, 100.0),
        "final turn, one frozen": (0.0, 78.0),
        "best without talking": (0.0, 53.0),
    },
    REAL_MODEL: {"first turn": (45.0, 55.0), "final turn": (80.0, 100.0)},
}
"""The least and the most percent of right answers that each measure may have for every seed, by configuration.

What is not expected of a configuration is not measured.
"""


def about() -> dict[str, str]:
    """Where and when the figures were measured, and with which code: the last commit that changed what a run depends
    on."""
    git, code = ["git", "-C", str(ROOT)], ["--", "maporl", "trl_ext", "configs"]
    last = [*git, "log", "-1", "--format=%h", *code]
    commit = subprocess.run(last, capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", *code], check=False).returncode
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "commit": commit.strip() + (" with changes" if changed else ""),
        "machine": f"{name}, {os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
        "date": time.strftime("%Y-%m-%d"),
    }


def trained(config: str, seed: int, sets: list[str], folder: Path) -> tuple[Run, dict[str, Any]]:
    """Train a configuration once. Return the run and its accuracies in percent by turn, the team's first."""
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = train(config, seed, sets, folder)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures: dict[str, Any] = {
        when: [
            {"team": _percent(turn["team"]), **{name: _percent(own) for name, own in turn["agents"].items()}}
            for turn in done.evaluation(when)["turns"]
        ]
        for when in ("before", "after")
    }
    seconds = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    return done, figures | {"seconds": round(done.seconds), "cpu_seconds": round(seconds)}


def without_talking(run: Run) -> dict[str, float]:
    """Percent right of each agent alone, and of majority votes at the dialogues' number of sampled tokens."""
    command = [sys.executable, "-m", "maporl", "eval", str(run.folder), "--json"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: _percent(share) for name, share in json.loads(told)["baselines"].items()}


def _percent(share: dict[str, float]) -> float:
    return round(100 * share["count"] / share["total"], 2)


def measured(seed: int, options: argparse.Namespace, root: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Train one seed and measure what is expected of the configuration. Return the measures, and the runs' figures."""
    expected = EXPECTED[options.config]
    both, figures = trained(options.config, seed, options.set, root / f"both-{seed}")
    measures = {"first turn": figures["after"][0]["team"], "final turn": figures["after"][-1]["team"]}
    told: dict[str, Any] = {"both": figures}
    if "final turn, one frozen" in expected:
        frozen = ("bob", "ann")[seed % 2]
        freeze = f"schedule.freeze=[{{agent: {frozen}, first: 1, last: 1000000}}]"
        _, alone = trained(options.config, seed, [*options.set, freeze], root / f"frozen-{seed}")
        measures["final turn, one frozen"] = alone["after"][-1]["team"]
        told |= {"frozen": frozen, "one": alone}
    if "best without talking" in expected:
        told["without talking"] = without_talking(both)
        measures["best without talking"] = max(told["without talking"].values())
    return measures, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=list(EXPECTED), default=QUICKSTART)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--keep", type=Path, default=None, help="keep the run folders here")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp())
    expected = EXPECTED[options.config]
    changed = [
        value for value in options.set if ".model=" not in value
    ]  # a folder of this machine tells nobody anything
    report: dict[str, Any] = {
        **about(),
        "configuration": options.config,
        "set": changed,
        "expected": expected,
        "runs": [],
    }
    missed = 0
    for seed in options.seeds:
        measures, told = measured(seed, options, root)
        wrong = [name for name, (least, most) in expected.items() if not least <= measures[name] <= most]
        missed += len(wrong)
        report["runs"].append({"seed": seed, **measures, "missed": wrong, **told})
        options.output.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({"seed": seed, **measures, "seconds": told["both"]["seconds"], "missed": wrong}), flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
