"""Compare updates of G answers to one prompt: each token read once, rows read one by one, and TRL's GRPOTrainer.

    python benchmarks/packed_updates.py --model DIR --rounds 2 [--groups 8] [--answers 8] [--prompt-len 256] \
        [--answer-len 64] [--micro 16] [--epochs 2] [--dtype bfloat16] [--peer-python VENV/bin/python]

All do the same work on the same random ids: old log-probabilities, reference log-probabilities, and ``--epochs`` passes
with an optimizer step in each, all weights trained. Nothing is sampled. Each measurement is a process of its own, and
the three take turns. ``rows`` is this package without trees, which is what it does for models that cannot read them.
``--peer-python`` is an environment with TRL 1.16; by default it is this one. The script prints a Markdown table of
medians, with the machine and the date. A ratio of times above 1 means that ``trees`` is faster.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise

from machine import machine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout

KL = 0.04


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8, help="answers in a group")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--micro", type=int, default=16, help="answers per forward and backward")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--updates", type=int, default=2, help="measured updates in a process, after one that warms up")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--highest", type=int, default=40000, help="ids are below this number")
    parser.add_argument("--cpu", action="store_true", help="use the CPU where there is an accelerator")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=["trees", "rows", "trl"])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--once", action="store_true", help="measure the first of --variants in this process")
    return parser.parse_args()


def groups_of_ids(options: argparse.Namespace) -> list[tuple[list[int], list[list[int]]]]:
    """Return each prompt with its answers, as random ids."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(100, options.highest, (count,), generator=generator).tolist()

    return [
        (ids(options.prompt_len), [ids(options.answer_len) for _ in range(options.answers)])
        for _ in range(options.groups)
    ]


def now() -> tuple[float, float]:
    """Return the time on the clock and the time of the processor, of which other programs take none."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter(), time.process_time()


def maporl_updates(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return when each update by a :class:`Learner` starts, and when the last one ends."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_ext import PPOv2Config
    from trl_ext.learning import learner
    from trl_ext.learning.learners import Learning
    from trl_ext.learning.policy import Policy
    from trl_ext.ppo.batch import Completion

    if options.variants[0] == "rows":
        learner.tree_limits = lambda model: None  # type: ignore[assignment]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    args = PPOv2Config(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.micro, num_ppo_epochs=options.epochs,
        learning_rate=1e-6, temperature=1.0, kl_coef=KL, kl_in="loss", kl_estimator="k3", report_to=[], use_cpu=options.cpu,  # noqa: E501
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    policy = learner.Learner(Policy("policy", model, tokenizer), args, critic="none")
    accelerator = Accelerator(cpu=options.cpu)
    policy.prepare(accelerator, updates=options.updates + 1)
    learning = Learning({"policy": policy}, args, accelerator.device)
    completions = [
        Completion(prompt, answer, True, f"{number}")
        for number, (prompt, answers) in enumerate(groups_of_ids(options))
        for answer in answers
    ]
    starts = [now()]
    for number in range(options.updates + 1):
        batches, _ = learning.token_batches({"policy": completions})
        rows = batches["policy"]
        rows.advantages = torch.randn(len(rows), 1).to(rows.sampled_mask.device) * rows.sampled_mask
        learning.update(batches, number)
        starts.append(now())
    return starts


def trl_updates(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return when each update by TRL's trainer starts, and when the last one ends.

    Its rollout function returns the ids at once.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    groups = groups_of_ids(options)
    starts: list[tuple[float, float]] = []

    def rollouts(prompts: list, trainer: GRPOTrainer) -> dict:
        starts.append(now())
        turns = [(prompt, answer) for prompt, answers in groups for answer in answers]
        return {
            "prompt_ids": [prompt for prompt, _ in turns],
            "completion_ids": [answer for _, answer in turns],
            "logprobs": [[0.0] * len(answer) for _, answer in turns],
        }

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    answers = options.groups * options.answers
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.micro, num_generations=options.answers,
        gradient_accumulation_steps=answers // options.micro, num_iterations=options.epochs, beta=KL,
        max_completion_length=options.answer_len, max_steps=options.epochs * (options.updates + 1), learning_rate=1e-6,
        bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, use_cpu=options.cpu, disable_dropout=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: torch.randn(len(completions)).tolist(),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"question {number}" for number in range(options.groups)] * 100}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    starts.append(now())
    return starts


def once(options: argparse.Namespace) -> dict:
    """Measure one variant in this process, without its first update."""
    import torch

    torch.set_num_threads(options.threads)
    starts = (trl_updates if options.variants[0] == "trl" else maporl_updates)(options)
    clock, processor = ([round(b - a, 2) for a, b in pairwise(times)] for times in zip(*starts, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": clock[1:], "processor": processor[1:], "peak_bytes": peak}


def main() -> None:
    options = parse()
    if options.once:
        print(json.dumps(once(options)))
        return
    given = sys.argv[1:]
    seconds: dict[str, list[float]] = {variant: [] for variant in options.variants}
    processor: dict[str, list[float]] = {variant: [] for variant in options.variants}
    memory: dict[str, list[int]] = {variant: [] for variant in options.variants}
    load = []
    for _ in range(options.rounds):
        for variant in options.variants:
            load.append(os.getloadavg()[0])
            python = options.peer_python if variant == "trl" else sys.executable
            command = [python, __file__, *given, "--once", "--variants", variant]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
            found = json.loads(done.stdout.strip().splitlines()[-1])
            seconds[variant] += found["seconds"]
            processor[variant] += found["processor"]
            memory[variant].append(found["peak_bytes"])
            print(f"{variant}: {found}, load {load[-1]:.1f}", file=sys.stderr, flush=True)
    print(machine(), end="; ")
    print(f"trl {version('trl')}; ", end="")
    print(f"load when a process started: {min(load):.1f} to {max(load):.1f}\n")
    first = options.variants[0]
    print(f"| {options.dtype} | s | {first} is faster by | processor s | {first} needs | peak GB | {first} needs |")
    print("|---|---|---|---|---|---|---|")
    best = [statistics.median(found[first]) for found in (seconds, processor, memory)]
    for variant in options.variants:
        s, p, m = (statistics.median(found[variant]) for found in (seconds, processor, memory))
        print(f"| {variant} | {s:.1f} | {s / best[0]:.2f} | {p:.1f} | {best[1] / p:.0%} ", end="")
        print(f"| {m / 2**30:.2f} | {best[2] / m:.0%} |")


if __name__ == "__main__":
    main()
