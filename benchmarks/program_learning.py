"""Does a plain program learn as the protocol inside does? The planner and the searcher of configs/ppo/hops.yaml.

    python benchmarks/program_learning.py [--seeds 0 1 2 3 4] [--updates 60] [--output FILE] [--keep FOLDER]

For each seed a warm start makes a team that knows how to call. Then the protocol ``call_return`` and the program
``examples/programs/hops.py`` train it, one after the other, in an order that changes from seed to seed. It prints the
held-out accuracy before and after, the seconds of each run, and the difference of the accuracies after, paired by seed,
with a 95% t interval. It needs the package ``openai``.
"""

import argparse
import json
import tempfile
from pathlib import Path

from learning import Run, interval, right, train

ROOT = Path(__file__).parents[1]
PROTOCOL, PROGRAM = str(ROOT / "configs/ppo/hops.yaml"), str(ROOT / "examples/programs/hops.yaml")
AGENTS = ("planner", "searcher")


def warm(seed: int, folder: Path) -> list[str]:
    """Make a team by a warm start, and return the options with which another run begins with it."""
    options = ["updates=1", "training.learning_rate=0", "evaluation.questions=0"]
    done = train(PROTOCOL, seed, options, folder)
    return [f"agents.{name}.model={done.folder / 'final' / name}" for name in AGENTS]


def main() -> None:
    """Train, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp())
    protocol = ["agent_defaults.tiny=null", "warm_start.steps=0"]
    rows: dict[str, dict[int, Run]] = {"protocol": {}, "program": {}}
    print("| seed | before | after, protocol | after, program | seconds, protocol | seconds, program |")
    print("|---|---|---|---|---|---|")
    for seed in options.seeds:
        begin = [*warm(seed, root / f"warm-{seed}"), f"updates={options.updates}"]
        ways = {"protocol": (PROTOCOL, [*protocol, *begin]), "program": (PROGRAM, begin)}
        for name in list(ways)[:: 1 if seed % 2 else -1]:
            rows[name][seed] = train(*_of(ways[name], seed), root / f"{name}-{seed}")
        runs = [rows[name][seed] for name in ("protocol", "program")]
        after = [f"{right('after')(run):.1f}%" for run in runs]
        before = f"{right('before')(runs[0]):.1f}%"
        print(
            f"| {seed} | {before} | {' | '.join(after)} | {' | '.join(f'{run.seconds:.0f}' for run in runs)} |",
            flush=True,
        )
    values = {name: [right("after")(run) for run in runs.values()] for name, runs in rows.items()}
    differences = [b - a for a, b in zip(values["protocol"], values["program"], strict=True)]
    if len(differences) > 1:
        print(f"program less protocol, points: {interval(differences)}")
    if options.output:
        options.output.write_text(json.dumps({"seeds": options.seeds, **values}, indent=1) + "\n")


def _of(way: tuple[str, list[str]], seed: int) -> tuple[str, int, list[str]]:
    config, sets = way
    return config, seed, sets


if __name__ == "__main__":
    main()
