"""Measure programs as tools: calls of the sandboxed Python, and rounds of MBPP.

    python benchmarks/programs.py --source mbpp.jsonl

It prints one JSON line. ``python_calls_per_second``: calls of the tool ``python`` with one worker and one thread, a
program that prints a sum. ``round_seconds``: an MBPP round of ``--programs`` reference solutions, each with its hidden
tests, on ``--workers`` workers. Both are the best of ``--repeats`` passes.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

from maporl.datasets.programs import MBPP, hidden_tests
from maporl.environments.python import Python
from maporl.sandbox.pool import SandboxPool


def calls_per_second(calls: int) -> float:
    """Call the tool one call after another."""
    box = Python(workers=1)
    (tool,) = box.tools()
    tool.run(code="0")
    started = time.perf_counter()
    for number in range(calls):
        assert tool.run(code=f"print({number} + 1)").text == str(number + 1)
    taken = time.perf_counter() - started
    box.close()
    return calls / taken


def round_seconds(source: str, programs: int, workers: int | None) -> float:
    """Run reference solutions with their hidden tests."""
    examples = list(MBPP(source=source))
    chosen = [examples[number % len(examples)] for number in range(programs)]
    work = [hidden_tests(example, example.meta["reference"]) for example in chosen]
    pool = SandboxPool(workers=workers)
    pool.run_tests(work[:8])
    started = time.perf_counter()
    found = pool.run_tests(work)
    taken = time.perf_counter() - started
    pool.close()
    assert all(outcome.ok for outcomes in found for outcome in outcomes)
    return taken


def best(measure: Callable[[], float], repeats: int, choose: Callable[[list[float]], float]) -> float:
    """Measure several times."""
    return round(choose([measure() for _ in range(repeats)]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="a .jsonl file of MBPP")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--programs", type=int, default=256)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rate = best(lambda: calls_per_second(options.calls), options.repeats, max)
    seconds = best(lambda: round_seconds(options.source, options.programs, options.workers), options.repeats, min)
    print(json.dumps({"python_calls_per_second": rate, "round_seconds": seconds, "cpus": os.cpu_count()}))


if __name__ == "__main__":
    main()
