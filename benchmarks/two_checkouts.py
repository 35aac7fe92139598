"""Seconds of the updates of `toy_sum.yaml` with this checkout's code and with another's, both at once on a core each.

    python benchmarks/two_checkouts.py ANOTHER_CHECKOUT [--rounds 6] [--updates 12] [--check]

With `--check` it is the CPU time of `maporl check quickstart` beyond the imports.

Says whether a change made training slower. A shared machine's speed drifts by more than the differences that matter, so
the two run at the same time, and change cores from round to round. Linux only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CHECK = """
import json, sys, time
import maporl.runs.train, maporl.engines.transformers
from maporl.validation.load import load
from maporl.validation.preflight import check_run
begun = time.process_time()
config = load("quickstart", ["output_dir=" + sys.argv[1]])
loaded = time.process_time()
check_run(config)
print(json.dumps({"load": loaded - begun, "check": time.process_time() - loaded}))
"""


def start(checkout: Path, core: int, updates: int, folder: Path) -> subprocess.Popen:
    """Start a short run with one checkout's code on one core."""
    options = [f"output_dir={folder}", f"updates={updates}", "evaluation.questions=20", "warm_start.steps=60"]
    command = ["taskset", "-c", str(core), sys.executable, "-m", "maporl", "train", "--quiet"]
    command += [f"{HERE}/configs/ppo/toy_sum.yaml", *(part for option in options for part in ("--set", option))]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=checkout, env=environment)


def check_seconds(checkout: Path, core: int, folder: Path) -> dict[str, float]:
    """Return the seconds of the first check in a process."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = ["taskset", "-c", str(core), sys.executable, "-c", CHECK, str(folder)]
    return json.loads(subprocess.run(command, cwd=checkout, env=environment, capture_output=True, check=True).stdout)


def seconds(folder: Path) -> dict[str, float]:
    """Return the seconds of each ``time/*`` metric of a run, summed over its updates."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if name.startswith("time/")}
    return {name: sum(row.get(name, 0.0) for row in rows) for name in sorted(names)}


def main() -> None:
    """Print the seconds of every round, and the geometric mean and range of the ratios of pairs of rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    checkouts = {"this": HERE, "other": arguments.other.resolve()}
    cores = sorted(os.sched_getaffinity(0))[:2]
    ratios = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            places = list(zip(checkouts.items(), cores if number % 2 == 0 else cores[::-1], strict=True))
            if arguments.check:
                measured = {name: check_seconds(path, core, Path(folder, name)) for (name, path), core in places}
            else:
                running = [start(path, core, arguments.updates, Path(folder, name)) for (name, path), core in places]
                if any(process.wait() for process in running):
                    raise SystemExit("a run failed: its message is above")
                measured = {name: seconds(Path(folder, name)) for name in checkouts}
        totals = {name: sum(parts.values()) for name, parts in measured.items()}
        ratios.append(totals["this"] / totals["other"])
        parts = {part: f"{value / measured['other'][part]:.3f}" for part, value in measured["this"].items()}
        print(f"this {totals['this']:.3f} s, other {totals['other']:.3f} s: {ratios[-1]:.3f} {parts}", flush=True)
    # one pair of rounds has each checkout once on each core
    pairs = [(a * b) ** 0.5 for a, b in zip(ratios[::2], ratios[1::2], strict=False)]
    print(
        f"this / other: {statistics.geometric_mean(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f}, {len(pairs)} "
        "pairs)"
    )


if __name__ == "__main__":
    main()
