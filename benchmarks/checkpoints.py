"""How long training waits for a checkpoint: written at once as plain folders, and in the background in shards.

    python benchmarks/checkpoints.py MODEL [--rounds 3]

``MODEL`` is a folder or the hub name of a causal language model, whose weights are all trained in float32. The ways
take turns in one run. For each it prints the median seconds until training goes on, and until the checkpoint is whole.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import PPOv2Config
from trl_ext.learning.checkpoint import CheckpointWriter, Learners
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.ppo.batch import Completion, build_token_batch


def main() -> None:
    """Write checkpoints of one learner in both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args = PPOv2Config(output_dir=folder, report_to=[], use_cpu=True, kl_coef=0.0)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        learner = Learner(Policy("policy", model, tokenizer), args)
        learner.prepare(Accelerator(cpu=True), 1)
        rows = build_token_batch([Completion([1, 2, 3], [4, 5], True, "a row")], learner.device)
        learner.annotate(rows)
        rows.advantages, rows.returns = rows.sampled_mask.float(), rows.sampled_mask.float()
        learner.accumulate(rows, torch.arange(1))
        learner.step()  # the optimizer has a state from here on
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(options.rounds):
            for background in found:
                args.async_save = background
                start = time.perf_counter()
                saving = CheckpointWriter(
                    Path(folder) / f"checkpoint-{number}-{background}", Learners(policy=learner), {}
                )
                if not background:
                    saving.finish()
                waited = time.perf_counter() - start
                if background:
                    saving.finish()
                found[background].append((waited, time.perf_counter() - start))
        size = sum(path.stat().st_size for path in Path(folder).glob("checkpoint-0-True/**/*") if path.is_file())
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {size / 1e9:.2f} GB a checkpoint")
        for background, name in ((False, "at once"), (True, "in the background (async_save)")):
            waited, whole = (statistics.median(times) for times in zip(*found[background], strict=True))
            print(f"{name}: training waits {waited:.2f} s, whole after {whole:.2f} s")


if __name__ == "__main__":
    main()
