"""Seconds to grade a benchmark's answers with this checkout's code and with another's, and whether all grades are the same.

    python benchmarks/grading.py gsm8k/test.jsonl --task gsm8k --other ANOTHER_CHECKOUT

Each row is graded with its right answer in two forms and with the next row's answer. The two checkouts take turns, and the
fastest of the rounds counts, because a shared machine only ever adds time. Without ``--other`` it measures this checkout.
The time that the process for mathematics takes to start is printed apart.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
GRADE = """
import hashlib, json, sys, time
from maporl.tasks import GSM8K, Mathematics
from maporl.tasks.grading import same_answer
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")][:int(sys.argv[3])]
task = {"gsm8k": GSM8K, "math": Mathematics}[sys.argv[2]](source=sys.argv[1])
examples = list(task)[:len(rows)]
texts = [
    (example, text)
    for example, other in zip(examples, [*examples[1:], examples[0]])
    for text in (f"So it is.\\nAnswer: {example.answer}", f"\\\\boxed{{{example.answer}}}", f"\\\\boxed{{{other.answer}}}")
]
started = time.perf_counter()
same_answer("x+1", "1+x")
loaded = time.perf_counter()
grades = [task.grade(example, text) for example, text in texts]
seconds = time.perf_counter() - loaded
digest = hashlib.sha256(repr([(g.answer, g.correct, g.reason) for g in grades]).encode()).hexdigest()
right = sum(g.correct is True for g in grades)
print(json.dumps({"grades": len(grades), "right": right, "seconds": seconds, "start": loaded - started, "digest": digest}))
"""


def measure(checkout: Path, arguments: argparse.Namespace) -> dict:
    """Grade everything once in a process of its own."""
    command = [sys.executable, "-c", GRADE, arguments.source, arguments.task, str(arguments.rows)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True).stdout)


def main() -> None:
    """Print a JSON line for each checkout, and the ratio of their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=os.path.abspath, help="a .jsonl file with 'question' and 'answer'")
    parser.add_argument("--task", choices=["gsm8k", "math"], default="gsm8k")
    parser.add_argument("--other", type=Path, help="another checkout of this project")
    parser.add_argument("--rows", type=int, default=1319, help="the first so many rows")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    checkouts = {"this": HERE} | ({"other": arguments.other.resolve()} if arguments.other else {})
    measured: dict[str, list[dict]] = {name: [] for name in checkouts}
    for number in range(arguments.rounds):
        for name in list(checkouts)[:: 1 if number % 2 else -1]:
            measured[name].append(measure(checkouts[name], arguments))
    best = {name: min(runs, key=lambda run: run["seconds"]) for name, runs in measured.items()}
    for name, run in best.items():
        print(json.dumps({"checkout": name} | run))
    if "other" in best:
        same = best["this"]["digest"] == best["other"]["digest"]
        ratio = best["this"]["seconds"] / best["other"]["seconds"]
        print(f"this takes {ratio:.3f} of the other's time; the grades are {'the same' if same else 'NOT the same'}")


if __name__ == "__main__":
    main()
