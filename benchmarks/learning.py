"""What a configuration learns, over several seeds: the README's learning figures.

    python benchmarks/learning.py configs/ppo/quickstart.yaml --seeds 0 1 2
    python benchmarks/learning.py configs/ppo/smollm2_times.yaml --seeds 0 --set agents.ann.model=DIR --set agents.bob.model=DIR

Each seed is a run of its own process, one after the other. Prints a Markdown table: held-out accuracy of all agents
together in the first and the final turn, before and after training, and the run's wall-clock seconds from start to end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, default=None, help="keep the run folders here")
    options = parser.parse_args()
    print(
        "| seed | first turn before | final turn before | first turn after | final turn after | gain | final - first | s |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for seed in options.seeds:
        root = options.keep or Path(tempfile.mkdtemp())
        folder = root / f"{Path(options.config).stem}-seed{seed}"
        sets = [f"seed={seed}", f"output_dir={folder}", *options.set]
        command = [sys.executable, "-m", "maporl", "train", options.config, "-q"]
        started = time.perf_counter()
        subprocess.run([*command, *(x for s in sets for x in ("--set", s))], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        before, after = (json.loads((folder / f"evaluation_{when}.json").read_text()) for when in ("before", "after"))
        (a, b), (c, d) = ([e["turns"][i]["team"]["value"] for i in (0, -1)] for e in (before, after))
        print(
            f"| {seed} | {a:.1%} | {b:.1%} | {c:.1%} | {d:.1%} | {100 * (d - b):+.1f} | {100 * (d - c):+.1f} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
