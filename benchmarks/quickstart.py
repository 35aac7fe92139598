"""Measure what two specialists gain by talking, over several seeds, and write it down as JSON.

    python benchmarks/quickstart.py --seeds 0 1 2 3 4 5 6 7 8 9 --threads 1 --output benchmarks/results/quickstart.json
    python benchmarks/quickstart.py --seeds 0 1 2 --threads 2 --output benchmarks/results/quickstart.json
    python benchmarks/quickstart.py page
    python benchmarks/quickstart.py --seeds 0 --set training.learning_rate=6.0e-4 --output narrow.json
    python benchmarks/quickstart.py --config configs/ppo/smollm2_listen.yaml --seeds 0 1 2 --output real.json \
        --set agents.ann.model=DIR --set agents.bob.model=DIR

Each seed of the quickstart is trained twice, one run after the other: with both agents learning, and with one of them
frozen (bob for even seeds, ann for odd ones). ``maporl eval`` then lets each agent of the first run answer alone, and
by a majority vote over as many sampled tokens as the dialogues have. The configuration of the real model, which takes
longer, is only trained once a seed, with both agents learning.

``--threads`` repeats all that with so many threads of PyTorch, whose sums round differently. With more than one, only
the run in which both learn is made. Runs that the file has already are not made again.

The file holds, for each run, its commit, machine and date, its accuracies in percent, its seconds and the CPU seconds
of its process. The command ends with status 1 if a seed misses an expectation of its configuration. ``page`` writes the
table of ``docs/learning.md`` from the file, and ends with status 1 if the README says other numbers.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from learning import Run, train
from machine import processor

ROOT = Path(__file__).parents[1]
QUICKSTART, REAL_MODEL = "configs/ppo/quickstart.yaml", "configs/ppo/smollm2_listen.yaml"
EXPECTED = {
    QUICKSTART: {
        "first turn": (47.0, 53.0),
        "final turn": (94.0, 100.0),
        "final turn, one frozen": (0.0, 78.0),
        "best without talking": (0.0, 53.0),
    },
    REAL_MODEL: {"first turn": (45.0, 55.0), "final turn": (80.0, 100.0)},
}
"""The least and the most percent of right answers that each measure may have for every seed, by configuration.

What is not expected of a configuration is not measured.
"""


CONSTANT_RATE = {"training.lr_scheduler_type": "constant", "training.lr_scheduler_kwargs": None}
"""For runs of the quickstart that are compared at any number of updates: its rate falls over the last twenty."""

RESULTS, PAGE = ROOT / "benchmarks/results/quickstart.json", ROOT / "docs/learning.md"
TABLE = ("<!-- python benchmarks/quickstart.py page -->\n\n", "\n<!-- end -->\n")
"""What stands before and after the table on the page."""


def about() -> dict[str, str]:
    """Where and when the figures were measured, and with which code: the last commit that changed what a run depends
    on."""
    git, code = ["git", "-C", str(ROOT)], ["--", "maporl", "trl_ext", "configs"]
    last = [*git, "log", "-1", "--format=%h", *code]
    commit = subprocess.run(last, capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", *code], check=False).returncode
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return {
        "commit": commit.strip() + (" with changes" if changed else ""),
        "machine": f"{processor()}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}",
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


def measured(seed: int, threads: int, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Train one seed, and return what is expected of the configuration and the figures of the runs."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    expected, changes = EXPECTED[options.config], options.set
    both, figures = trained(options.config, seed, changes, root / f"both-{threads}-{seed}")
    told = {"first turn": figures["after"][0]["team"], "final turn": figures["after"][-1]["team"], "both": figures}
    if "final turn, one frozen" in expected and threads == 1:
        frozen = ("bob", "ann")[seed % 2]
        freeze = f"schedule.freeze=[{{agent: {frozen}, first: 1, last: 1000000}}]"
        _, alone = trained(options.config, seed, [*changes, freeze], root / f"frozen-{seed}")
        told |= {"final turn, one frozen": alone["after"][-1]["team"], "frozen": frozen, "one": alone}
    if "best without talking" in expected and threads == 1:
        votes = without_talking(both)
        told |= {"best without talking": max(votes.values()), "without talking": votes}
    missed = [name for name, (least, most) in expected.items() if name in told and not least <= told[name] <= most]
    return {"seed": seed, "threads": threads, "missed": missed, **told, **about()}


def tables(report: dict[str, Any]) -> str:
    """Return the Markdown tables of the quickstart's runs: one for one thread, and one for all numbers of threads."""
    alone = [run for run in report["runs"] if run["threads"] == 1]
    lines = [
        "| seed | before: first turn | final turn | after: first turn | final turn | ann | bob | one trained "
        "| (frozen) | no talking | CPU s |",
        "|---" * 11 + "|",
    ]
    for run in alone:
        turns = [*run["both"]["before"], *run["both"]["after"]]
        shares = [*(turn["team"] for turn in turns), turns[-1]["ann"], turns[-1]["bob"], run["final turn, one frozen"]]
        cells = [*(f"{share:.1f}%" for share in shares), run["frozen"], f"{run['best without talking']:.1f}%"]
        lines.append(" | ".join(["", str(run["seed"]), *cells, str(run["both"]["cpu_seconds"]), ""]).strip())
    lines += ["", "| threads | final turn of each seed | mean | first turns |", "|---|---|---|---|"]
    for threads in sorted({run["threads"] for run in report["runs"]}):
        runs = [run for run in report["runs"] if run["threads"] == threads]
        first, final = ([run[f"{turn} turn"] for run in runs] for turn in ("first", "final"))
        listed = ", ".join(f"{share:.1f}" for share in final)
        lines.append(
            f"| {threads} | {listed} | {statistics.mean(final):.1f}% | {min(first):.1f} to {max(first):.1f}% |"
        )
    told = {key: sorted({run[key] for run in report["runs"]}) for key in ("machine", "date", "commit")}
    machines = {machine.split(", OMP")[0] for machine in told["machine"]}
    lines += ["", f"{', '.join(sorted(machines))}; {', '.join(told['date'])}; at commit {', '.join(told['commit'])}."]
    return "\n".join(lines) + "\n"


def sentence(report: dict[str, Any]) -> str:
    """Return what the README says of the runs with one thread."""
    final = [run["final turn"] for run in report["runs"] if run["threads"] == 1]
    return (
        f"the final turn goes from half to {statistics.mean(final):.1f}% ({len(final)} seeds: {min(final):.1f} to "
        f"{max(final):.1f}%)"
    )


def page() -> int:
    """Write the tables into their page. Return 1 if the README says something else of the runs, and else 0."""
    report, text = json.loads(RESULTS.read_text()), PAGE.read_text()
    before, rest = text.split(TABLE[0])
    PAGE.write_text(before + TABLE[0] + tables(report) + rest[rest.index(TABLE[1]) :])
    if sentence(report) in " ".join((ROOT / "README.md").read_text().split()):
        return 0
    print(f"README.md: expected the words: {sentence(report)}", file=sys.stderr)
    return 1


def main() -> None:
    if sys.argv[1:] == ["page"]:
        sys.exit(page())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=list(EXPECTED), default=QUICKSTART)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--keep", type=Path, default=None, help="keep the run folders here")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp())
    runs = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    report = {
        "configuration": options.config,
        "set": [value for value in options.set if ".model=" not in value],  # a folder of this machine tells nobody
        "expected": EXPECTED[options.config],
        "runs": runs,
    }
    for threads in options.threads:
        for seed in options.seeds:
            if any((run["seed"], run["threads"]) == (seed, threads) for run in runs):
                continue
            runs.append(measured(seed, threads, options, root))
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            told = {key: value for key, value in runs[-1].items() if not isinstance(value, dict)}
            print(json.dumps(told | {"seconds": runs[-1]["both"]["seconds"]}), flush=True)
    sys.exit(1 if any(run["missed"] for run in runs) else 0)


if __name__ == "__main__":
    main()
