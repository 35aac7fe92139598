"""Measure how many programs of a TinyGSM file the sandbox runs in a second, without its cache.

    python benchmarks/sandbox.py --source tinygsm.jsonl --kind auto

It prints one JSON line for the fastest of ``--repeats`` passes: ``rows_per_second``, ``start_seconds`` of the worker,
and ``reasons``. This process, the worker and its forks take turns, so the rate is that of one core.
"""

import argparse
import json
import os
import time
from collections import Counter

from maporl.sandbox.sandbox import Sandbox
from maporl.tasks.base import read_rows


def measure(codes: list[str], kind: str) -> dict:
    """Run all programs once with a new worker."""
    started = time.perf_counter()
    with Sandbox(kind=kind, cache=False) as sandbox:
        sandbox.run("0", "f")
        loaded = time.perf_counter()
        outcomes = sandbox.run_many(codes, "simple_math_problem")
        done = time.perf_counter()
    return {
        "kind": sandbox.kind,
        "rows": len(codes),
        "rows_per_second": round(len(codes) / (done - loaded), 1),
        "start_seconds": round(loaded - started, 3),
        "reasons": dict(Counter(outcome.reason for outcome in outcomes).most_common()),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="a .jsonl file with 'code', at the top or in 'meta'")
    parser.add_argument("--kind", choices=["auto", "bubblewrap", "restricted"], default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = read_rows(options.source, "train")
    # equal programs would run once
    codes = list(dict.fromkeys(row.get("code") or row["meta"]["code"] for row in rows))
    passes = [measure(codes, options.kind) for _ in range(options.repeats)]
    print(json.dumps(max(passes, key=lambda result: result["rows_per_second"])))


if __name__ == "__main__":
    main()
