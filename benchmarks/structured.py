"""What structured outputs cost, and whether a team learns under them.

    OMP_NUM_THREADS=2 python benchmarks/structured.py speed --model DIR [--rows 64 --rounds 3]
    OMP_NUM_THREADS=1 python benchmarks/structured.py learn --seeds 5 --runs FOLDER --output FILE

``speed`` samples 64 rows of a model, and makes an update of them, held to a JSON schema and free, in turn in one
process. Both sample equally many tokens: the schema asks for a text that is longer than an answer may be.

``learn`` trains the quickstart's team in three ways: with bare answers, as they are there; with answers in JSON, which
its warm start teaches, too; and with answers in JSON whose update reads the probabilities without the masks, as others
do who hand a grammar to the engine alone. A run that is there is not made again. Of each: the held-out accuracy of the
final turn, and the mean accuracy of that turn over the questions of all updates.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from machine import machine

from maporl.studies.comparing.study import T_975

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout
ROOT = Path(__file__).parents[1]
ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[0-9]{3}$"}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
ARMS = ("bare", "json", "json_unmasked")


def settings(arm: str, seed: int, folder: Path) -> dict:
    """Return the configuration of a run."""
    values: dict = {"extends": str(ROOT / "configs/ppo/quickstart.yaml"), "output_dir": str(folder), "seed": seed}
    if arm == "bare":
        return values
    agents = {
        name: {"structured_output": {"json_schema": ANSWER}, "tiny": {"alphabet": alphabet + '{}":a'}}
        for name, alphabet in (("ann", "0123456789+*;"), ("bob", ";*+9876543210"))
    }
    task = {"name": "structured_skills:JsonSkills", "skills": ["next", "reversed"]}
    return values | {"task": task, "agents": agents, "ppo": {"response_length": 12}}


def train(file: Path) -> None:
    """Train one run, in this process."""
    from maporl.runs.train import train
    from maporl.validation.load import load
    from trl_ext.learning.learner import Learner

    if "unmasked" in file.stem:
        Learner._masks = lambda self, rows: None  # type: ignore[method-assign]
    train(load(file), resume=False, quiet=True)


def learn(options: argparse.Namespace) -> None:
    """Make the runs that are not there, and write what they came to."""
    options.runs.mkdir(parents=True, exist_ok=True)
    found: dict = {arm: {} for arm in ARMS}
    for seed in range(options.seeds):
        for arm in ARMS:
            folder = (options.runs / f"{arm}-{seed}").resolve()
            if not (folder / "evaluation_after.json").exists():
                file = folder.with_suffix(".yaml")
                file.write_text(json.dumps(settings(arm, seed, folder)))
                path = f"{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
                subprocess.run(
                    [sys.executable, __file__, "train", str(file)], check=True, env={**os.environ, "PYTHONPATH": path}
                )
            after = json.loads((folder / "evaluation_after.json").read_text())
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            during = [r["accuracy/turn_2"] for r in records if "accuracy/turn_2" in r]
            found[arm][seed] = {
                "held out": 100 * after["turns"][-1]["team"]["value"],
                "over all updates": 100 * statistics.fmean(during),
            }
            print(arm, seed, found[arm][seed], flush=True)
    report = {"about": machine(), "runs": found, "differences": differences(found)}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["differences"], indent=1))


def differences(found: dict) -> dict:
    """Return the mean of each arm, and the others minus ``json`` over paired seeds with half of the 95% interval."""
    told: dict = {}
    for measure in ("held out", "over all updates"):
        values = {arm: {seed: run[measure] for seed, run in runs.items()} for arm, runs in found.items()}
        told[measure] = {arm: {"mean": statistics.fmean(own.values())} for arm, own in values.items()}
        for arm in ("bare", "json_unmasked"):
            apart = [own - values["json"][seed] for seed, own in values[arm].items()]
            half = T_975[len(apart)] * statistics.stdev(apart) / math.sqrt(len(apart))
            told[measure][arm] |= {"minus json": statistics.fmean(apart), "half": half}
    return told


def speed(options: argparse.Namespace) -> None:
    """Print how long sampling and an update take with a schema, and without."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from maporl.decoding import StructuredOutput
    from trl_ext import PPOv2Config
    from trl_ext.learning.learner import Learner
    from trl_ext.learning.policy import Policy
    from trl_ext.ppo.batch import Completion, build_token_batch
    from trl_ext.ppo.options import Grammar
    from trl_ext.sampling.request import Draw, TokenRequest
    from trl_ext.sampling.sample import sample

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2000}}, "required": ["text"]}
    grammar = Grammar(StructuredOutput(json_schema=long).text, (tokenizer.eos_token_id,))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (options.rows, options.prompt_len), generator=generator).tolist()
    args = PPOv2Config(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.rows, report_to=[], temperature=1.0,
        learning_rate=1e-6, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    learner = Learner(Policy("policy", model, tokenizer), args)

    class Alone:
        device = model.device
        mixed_precision = "no"

    learner.prepare(Alone(), updates=1)

    def sampled(held: Grammar | None) -> list[Completion]:
        ends = frozenset() if held is None else frozenset(held.stop_ids)
        draw = Draw(options.response_len, stop_ids=ends, grammar=held)
        requests = [TokenRequest("", prompt, draw, (number,)) for number, prompt in enumerate(prompts)]
        said = sample(model, requests, {"": tokenizer})
        return [
            Completion(p, s.ids, True, str(n), grammar=held) for n, (p, s) in enumerate(zip(prompts, said, strict=True))
        ]

    def updated(completions: list[Completion]) -> None:
        rows = build_token_batch(completions, model.device)
        learner.annotate(rows)
        rows.advantages = torch.ones_like(rows.old_logprobs) * rows.sampled_mask
        for _ in range(2):
            learner.accumulate(rows, torch.arange(len(rows)))
            learner.step()

    def timed(work: Callable) -> tuple[float, object]:
        start = time.perf_counter()
        made = work()
        return time.perf_counter() - start, made

    print(machine())
    times: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):
        for name, held in (("free", None), ("held", grammar))[:: 1 if number % 2 else -1]:
            seconds, completions = timed(lambda held=held: sampled(held))
            assert sum(len(c.response_ids) for c in completions) == options.rows * options.response_len
            update, _ = timed(lambda some=completions: updated(some))
            if number:  # the first one compiles and warms up
                times.setdefault(f"sampling, {name}", []).append(seconds)
                times.setdefault(f"update, {name}", []).append(update)
    for part in ("sampling", "update"):
        ratios = [b / a for a, b in zip(times[f"{part}, free"], times[f"{part}, held"], strict=True)]
        free, held = (statistics.median(times[f"{part}, {name}"]) for name in ("free", "held"))
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{part}: {free:.2f} s free, {held:.2f} s held to a schema: {held / free:.3f} times ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    one = parts.add_parser("speed")
    one.add_argument("--model", required=True)
    one.add_argument("--rows", type=int, default=64)
    one.add_argument("--prompt-len", type=int, default=32)
    one.add_argument("--response-len", type=int, default=64)
    one.add_argument("--dtype", default="float32")
    one.add_argument("--rounds", type=int, default=3)
    other = parts.add_parser("learn")
    other.add_argument("--seeds", type=int, default=5)
    other.add_argument("--runs", type=Path, required=True)
    other.add_argument("--output", type=Path, required=True)
    parts.add_parser("train").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.what == "train":
        train(options.file)
    else:
        {"speed": speed, "learn": learn}[options.what](options)


if __name__ == "__main__":
    main()
