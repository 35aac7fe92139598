"""How much longer two trainings on one machine take than one: the quickstart alone, and two of it together.

    python benchmarks/side_by_side.py [--rounds 3] [--updates 80] [--spin] [--config FILE] [--set KEY=VALUE]

A round times one run, and then two runs that start together, until both have ended; every second round does the two
first. The ratio of a round is the seconds of the two divided by those of the one. Two runs that share two cores without
a loss have a ratio of at most 2. ``--spin`` measures torch's own way beside it: a thread for each core, and threads
that spin while they wait. That can take very long, so give it few ``--updates``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from quickstart import QUICKSTART, ROOT, about

from trl_ext.process.threads import WAITING, usable_cores

AS_CHOSEN = "threads as maporl chooses them"
SPINNING = "a thread for each core, spinning"
DEFAULT_SPINS = 300_000
"""How often a thread of GNU's OpenMP looks whether it may go on before it sleeps, where no variable says how it waits.
"""


def variables(spin: bool) -> dict[str, str]:
    """Return the environment of a run, without what would choose its threads, or with torch's own way."""
    kept = {name: value for name, value in os.environ.items() if name not in (*WAITING, "OMP_NUM_THREADS")}
    spinning = {"OMP_NUM_THREADS": str(usable_cores()), "GOMP_SPINCOUNT": str(DEFAULT_SPINS)} if spin else {}
    return {**kept, "PYTHONPATH": str(ROOT), **spinning}


def seconds(count: int, spin: bool, options: argparse.Namespace) -> float:
    """Start ``count`` runs with different seeds together. Return the seconds until all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"updates={options.updates}", *options.set]
        started = time.perf_counter()
        running = []
        for seed in range(count):
            values = [f"seed={seed}", f"output_dir={folder}/{seed}", *sets]
            command = [sys.executable, "-m", "maporl", "train", "--quiet", options.config]
            command += [word for value in values for word in ("--set", value)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=variables(spin)))
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise SystemExit("a run failed: its message is above")
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--spin", action="store_true")
    parser.add_argument("--config", default=QUICKSTART)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    facts = about()
    print(f"{facts['machine'].split(', OMP')[0]}, {facts['date']}, commit {facts['commit']}, ", end="")
    print(f"{usable_cores()} cores for this process, load {os.getloadavg()[0]:.1f} before", flush=True)
    ways = {AS_CHOSEN: False} | ({SPINNING: True} if options.spin else {})
    alone: dict[str, list[float]] = {way: [] for way in ways}
    together: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way, spin in ways.items():
            for count in (1, 2) if number % 2 == 0 else (2, 1):
                (alone if count == 1 else together)[way].append(seconds(count, spin, options))
            print(f"round {number + 1}, {way}: one {alone[way][-1]:.1f} s, two {together[way][-1]:.1f} s", flush=True)
    for way in ways:
        ratios = [two / one for one, two in zip(alone[way], together[way], strict=True)]
        told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{way}: two take {told} times as long as one, which takes {statistics.median(alone[way]):.1f} s")


if __name__ == "__main__":
    main()
