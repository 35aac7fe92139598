"""Whether this checkout is slower than another commit: five ratios, of runs at the same time on a core each.

    python benchmarks/bench.py [--base 0e81a74d] [--pairs 2] [--only NAME ...] [--model DIR]

=============  ======================================================================================================
``start``      processor seconds of ``maporl check`` for three recipes, with everything that it imports
``rollout``    seconds of sampling 16 answers of 64 tokens, with a random model of 8 layers or ``--model``
``update``     seconds of the passes and steps on them: two epochs with a reference and a critic
``team``       seconds of 12 updates of two tiny agents (``toy_sum``)
``grading``    seconds of grading the labels of ``answers.txt`` in two forms, and as answers to each other
=============  ======================================================================================================

A shared machine's speed drifts by more than the differences that matter. So both checkouts run at the same time, and
change cores in the second round of each pair. What has become slower by more than 5% is marked, and the exit status is
then 1. Other work on the machine makes every figure doubtful. Linux with two cores only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import machine

HERE = Path(__file__).resolve().parents[1]
SLOWER = 1.05
RECIPES = ("quickstart", "calculator", "orchestrator")
GRADE = """
import json, sys, time
from maporl import Example, Mathematics
task = Mathematics(source=sys.argv[1])
labels = sorted({json.loads(line)["answer"] for line in open(sys.argv[1], encoding="utf-8")})
texts = [
    (Example("1", "", label, {}), text)
    for label, other in zip(labels, [*labels[1:], labels[0]])
    for text in (f"So it is.\\nAnswer: {label}", f"\\\\boxed{{{label}}}", f"\\\\boxed{{{other}}}")
]
task.grade(*texts[0])
begun = time.perf_counter()
for _ in range(10):
    for example, text in texts:
        task.grade(example, text)
print(json.dumps({"grading": time.perf_counter() - begun}))
"""
MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from maporl import build_tiny_tokenizer, TinySection
torch.manual_seed(0)
shape = LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=8192, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)
LlamaForCausalLM(shape).save_pretrained(sys.argv[1])
build_tiny_tokenizer(TinySection()).save_pretrained(sys.argv[1])
"""


class Inputs:
    """What all measures read: a model, and answers to grade.

    Args:
        folder: an empty folder.
        model: a folder with a causal language model, or None for a random one.
    """

    def __init__(self, folder: Path, model: Path | None):
        self.folder = folder
        self.model = model or folder / "model"
        if model is None:
            subprocess.run([sys.executable, "-c", MODEL, str(self.model)], check=True, capture_output=True)
        self.answers = folder / "answers.jsonl"
        lines = (HERE / "benchmarks/answers.txt").read_text(encoding="utf-8").splitlines()
        labels = [line.split(" | ", 2)[1] for line in lines if line[:1] in ("+", "-")]
        rows = [{"question": str(number), "answer": label} for number, label in enumerate(labels)]
        self.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def commands(self, out: Path) -> dict[str, list[list[str]]]:
        """Return what a process runs for each measure. ``out`` is a folder of its own."""
        step = ["--batch", "16", "--micro", "16", "--epochs", "2", "--updates", "3", "--threads", "1", "--json"]
        short = [f"output_dir={out / 'run'}", "updates=12", "evaluation.questions=20", "warm_start.steps=60"]
        sets = [part for option in short for part in ("--set", option)]
        return {
            "start": [["-m", "maporl", "check", name, f"output_dir={out / name}"] for name in RECIPES],
            "step": [[f"{HERE}/benchmarks/ppo_step.py", "--model", str(self.model), *step]],
            "team": [["-m", "maporl", "train", "--quiet", f"{HERE}/configs/ppo/toy_sum.yaml", *sets]],
            "grading": [["-c", GRADE, str(self.answers)]],
        }


def measured(name: str, out: Path, printed: list[str], processor: float) -> dict[str, float]:
    """Return the seconds of the ratios that a measure has, from what its processes printed and left in ``out``."""
    if name == "start":
        return {"start": processor}
    if name == "team":
        rows = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
        return {"team": sum(row[key] for row in rows for key in row if key.startswith("time/"))}
    found = json.loads(printed[-1].splitlines()[-1])
    if name == "grading":
        return found
    phases = found["seconds_per_phase"]
    return {"rollout": phases["collect"], "update": phases["advantage"] + phases["update"]}


def follow(commands: list[list[str]], checkout: Path, core: int) -> tuple[list[str], float]:
    """Run commands one after the other with a checkout's code on one core: what each printed, and their processor
    seconds."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    printed, seconds = [], 0.0
    for command in commands:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            words = ["taskset", "-c", str(core), sys.executable, *command]
            process = subprocess.Popen(words, cwd=checkout, env=environment, stdout=out, stderr=err)
            _, status, used = os.wait4(process.pid, 0)  # of this process and its children alone
            process.returncode = os.waitstatus_to_exitcode(status)
            for file in (out, err):
                file.seek(0)
            if process.returncode:
                raise SystemExit(f"{checkout}: {' '.join(command)[:300]} failed:\n{err.read()[-2000:]}")
            printed.append(out.read())
        seconds += used.ru_utime + used.ru_stime
    return printed, seconds


def round_of(name: str, inputs: Inputs, places: list[tuple[str, Path, int]]) -> dict[str, dict[str, float]]:
    """Measure each checkout on its core at the same time: the seconds of each ratio by the checkout's name."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder, ThreadPoolExecutor(len(places)) as threads:

        def measure(title: str, checkout: Path, core: int) -> dict[str, float]:
            out = Path(folder, title)
            out.mkdir()
            return measured(name, out, *follow(inputs.commands(out)[name], checkout, core))

        begun = {place[0]: threads.submit(measure, *place) for place in places}
        return {title: running.result() for title, running in begun.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="0e81a74d", help="a commit, or a folder with a checkout")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of rounds of each measure")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="start, step (rollout and update), team, grading")
    parser.add_argument("--model", type=Path, help="a folder with a causal language model for rollouts and updates")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    slower = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(options.base).resolve()
        added = not base.is_dir()
        if added:
            base = Path(folder, "base")
            subprocess.run(["git", "worktree", "add", "-q", "--detach", str(base), options.base], cwd=HERE, check=True)
        try:
            inputs = Inputs(Path(folder), options.model)
            print(f"this checkout against {options.base}; {machine()}\n")
            print("| | this, s | base, s | ratio | from | to |\n|---|---|---|---|---|---|")
            for name in options.only or inputs.commands(Path(folder)):
                seconds: dict[str, dict[str, list[float]]] = {}
                for number in range(2 * options.pairs):
                    order = cores if number % 2 == 0 else cores[::-1]
                    places = [("this", HERE, order[0]), ("base", base, order[1])]
                    for title, found in round_of(name, inputs, places).items():
                        for ratio, value in found.items():
                            seconds.setdefault(ratio, {}).setdefault(title, []).append(value)
                for ratio, both in seconds.items():
                    ratios = [this / other for this, other in zip(both["this"], both["base"], strict=True)]
                    # a pair of rounds has each checkout once on each core
                    pairs = [(a * b) ** 0.5 for a, b in zip(ratios[::2], ratios[1::2], strict=True)]
                    middle = statistics.geometric_mean(pairs)
                    mark = " **slower**" if middle > SLOWER else ""
                    slower += [ratio] if mark else []
                    print(
                        f"| {ratio} | {statistics.mean(both['this']):.2f} | {statistics.mean(both['base']):.2f} | "
                        f"{middle:.3f}{mark} | {min(pairs):.3f} | {max(pairs):.3f} |",
                        flush=True,
                    )
        finally:
            if added:
                subprocess.run(["git", "worktree", "remove", "--force", str(base)], cwd=HERE, check=True)
    sys.exit(f"slower than {options.base} by more than {SLOWER - 1:.0%}: {', '.join(slower)}" if slower else 0)


if __name__ == "__main__":
    main()
