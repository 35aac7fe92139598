"""Count what one update calls, and in how many files: how far a question travels from YAML to a gradient.

    python benchmarks/trace.py [--functions 25] [--pairs 10] [--peer CHECKOUT]

It is the plainest run: two tiny agents, a debate of two turns, 4 questions (16 answers), one process, no tools, no
branching. Calls of functions of maporl and trl_ext count, and each continuation of a generator. The second update is
measured, because the first one fills caches. The counts are of the main thread. ``--peer`` measures another checkout.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout
RUN = {
    "updates": 3,
    "task": {"name": "toy_skills", "skills": ["next", "reversed"]},
    "agents": {
        "ann": {"tiny": {"architecture": "llama", "alphabet": "0123456789+*;", "hidden_size": 16, "layers": 2}},
        "bob": {"tiny": {"architecture": "qwen3", "alphabet": ";*+9876543210", "hidden_size": 16, "layers": 2}},
    },
    "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "ppo": {"response_length": 5, "num_ppo_epochs": 1},
    "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True},
    "evaluation": {"questions": 0},
}
PHASES = {
    "collected": "collect",
    "score": "score",
    "advantage": "advantage",
    "update": "update",
    "finish_update": "finish",
}
"""The steps of an update, by the trainer's methods."""
Place = tuple[str, str]
"""A function: its file and its name. The expressions and functions within it count as it."""


class Trace:
    """The functions that each phase calls, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = tuple(f"{root / package}{os.sep}" for package in ("maporl", "trl_ext"))
        self.calls: dict[str, list[Place]] = {}
        self.phase = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.packages):
            name = code.co_qualname.partition(".<locals>")[0]
            self.calls.setdefault(self.phase, []).append((str(Path(code.co_filename).relative_to(self.root)), name))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the calls of the block as those of ``phase``, and not of the one around it."""
        outer, profiler = self.phase, sys.getprofile()
        self.phase = phase
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(profiler)
            self.phase = outer

    def counted(self, phase: str, step: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
        """Return ``step``, whose calls count as those of ``phase`` if ``when()``."""

        def run(*args: Any, **options: Any) -> Any:
            if not when():
                return step(*args, **options)
            with self.during(phase):
                return step(*args, **options)

        return run


def traced(root: Path, folder: Path) -> Trace:
    """Build the run and train it. Return the calls of its building, and of the phases of its second update."""
    sys.path.insert(0, str(root))
    import torch

    from maporl.runs.build import build_trainer
    from maporl.validation.load import load

    assert load.__code__.co_filename.startswith(str(root)), f"maporl is not that of {root}"
    torch.set_num_threads(1)
    file = folder / "run.yaml"
    file.write_text(json.dumps(RUN | {"output_dir": str(folder / "run")}))
    trace = Trace(root)
    with trace.during("build"):
        trainer = build_trainer(load(str(file)), quiet=True)
    for method, phase in PHASES.items():
        step = trace.counted(phase, getattr(trainer, method), lambda: trainer.state.global_step == 1)
        setattr(trainer, method, step)
    trainer._one_update = trace.counted("between", trainer._one_update, lambda: trainer.state.global_step == 1)
    trainer.train()
    return trace


def moves(calls: list[Place]) -> list[tuple[str, str]]:
    """Return the pairs of different files of calls that follow each other."""
    return [(a, b) for (a, _), (b, _) in itertools.pairwise(calls) if a != b]


def row(name: str, calls: list[Place]) -> str:
    """Return a row of the table of phases."""
    return (
        f"| {name} | {len(calls):,} | {len({file for file, _ in calls})} | {len(set(calls))} | {len(moves(calls)):,} |"
    )


def table(trace: Trace) -> Iterator[str]:
    """Yield the lines of the table of phases."""
    yield "| phase | calls | files | functions | moves from file to file |\n|---|---|---|---|---|"
    for phase in ("build", *PHASES.values()):
        yield row(phase, trace.calls[phase])
    yield row("**one update**", [call for phase, calls in trace.calls.items() if phase != "build" for call in calls])


def main() -> None:
    """Print the table, the functions that an update calls most often, and the files between which it moves most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=25)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--peer", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = traced(options.peer.resolve(), Path(folder))
    print(
        f"{datetime.date.today()}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores\n"
    )
    print(*table(trace), sep="\n")
    update = [call for phase, calls in trace.calls.items() if phase != "build" for call in calls]
    print("\n| calls | function | phases |\n|---|---|---|")
    for (file, function), count in Counter(update).most_common(options.functions):
        phases = [f"{n} {phase}" for phase in trace.calls if (n := trace.calls[phase].count((file, function)))]
        print(f"| {count} | {file} `{function}` | {', '.join(phases)} |")
    print("\n| moves | files |\n|---|---|")
    for files, count in Counter(frozenset(pair) for pair in moves(update)).most_common(options.pairs):
        print(f"| {count} | {' <-> '.join(sorted(files))} |")


if __name__ == "__main__":
    main()
