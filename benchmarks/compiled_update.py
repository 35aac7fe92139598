"""Measure what torch.compile of a policy's trunk brings to a minibatch, and what compiling costs.

    python benchmarks/compiled_update.py --model DIR --dtype bfloat16 --rounds 6 --shapes 8

Two learners with the same weights compute the gradient of the same minibatches, one of them with ``trunk.compile()``,
in turns. The result has the processor seconds of each (the median over ``--rounds``), the processor seconds of the
first compiled minibatch, which compiles, and of each of ``--shapes`` further minibatches of other lengths, with the
number of graphs that were compiled until then. A C++ compiler is needed. ``--model tiny`` is a random Llama.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout

import torch
from accelerate import Accelerator
from ppo_step import load
from torch._dynamo.utils import counters

from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.models.forward import trunk_of
from trl_ext.ppo.batch import Completion, TokenBatch, build_token_batch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder, or 'tiny'")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def learner_of(options: argparse.Namespace, compiled: bool) -> Learner:
    """Return a learner of the model with a critic's head, whose trunk is compiled or not."""
    model, tokenizer = load(options)
    args = PPOv2Config(
        output_dir=tempfile.mkdtemp(), use_cpu=True, kl_coef=0.0, learning_rate=1e-6, report_to=[], temperature=1.0,
        per_device_train_batch_size=options.rows,
    )  # fmt: skip
    learner = Learner(Policy("policy", model, tokenizer), args, critic="head")
    learner.prepare(Accelerator(cpu=True), updates=1000)
    if compiled:
        trunk_of(model).compile()
    return learner


def batch_of(options: argparse.Namespace, prompt: int, answer: int, seed: int) -> TokenBatch:
    """Return rows of random tokens with random advantages."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, 1000, (options.rows, prompt + answer), generator=generator).tolist()
    rows = build_token_batch(
        [Completion(row[:prompt], row[prompt:], True, f"row {n}") for n, row in enumerate(ids)], torch.device("cpu")
    )
    rows.old_logprobs = -7.0 * rows.sampled_mask
    rows.advantages = torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask
    rows.returns = rows.advantages.clone()
    return rows


def seconds(learner: Learner, rows: TokenBatch) -> tuple[float, float]:
    """Return the processor seconds of a gradient, and its loss."""
    started = time.process_time()
    loss = learner.accumulate(rows, torch.arange(len(rows)))["loss"]
    spent = time.process_time() - started
    learner.step()
    return spent, loss


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    eager, compiled = learner_of(options, False), learner_of(options, True)
    batches = [batch_of(options, options.prompt_len, options.response_len, n) for n in range(options.rounds + 1)]
    first, _ = seconds(compiled, batches[0])
    seconds(eager, batches[0])
    pairs = [(seconds(eager, rows), seconds(compiled, rows)) for rows in batches[1:]]
    lengths = torch.randint(options.prompt_len // 2, 2 * options.prompt_len, (options.shapes, 2)).tolist()
    others = []
    for number, (prompt, answer) in enumerate(lengths):
        spent, _ = seconds(compiled, batch_of(options, prompt, answer, number))
        others.append({"tokens": prompt + answer, "seconds": spent, "graphs": counters["stats"]["unique_graphs"]})
    result = {
        "eager_seconds": statistics.median(one for (one, _), _ in pairs),
        "compiled_seconds": statistics.median(other for _, (other, _) in pairs),
        "eager_over_compiled": sorted(one / other for (one, _), (other, _) in pairs),
        "loss_difference": max(abs(one - other) for (_, one), (_, other) in pairs),
        "first_compiled_seconds": first,
        "other_shapes": others,
        "options": vars(options),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
