"""Measure one update of two agents by CoMLRL 1.4.3's independent actor-critic. ``two_agents.py`` starts this.

    VENV/bin/python benchmarks/comlrl_step.py --model DIR [--prompts 8 --new-tokens 64 --critic head]

VENV has CoMLRL 1.4.3, and nothing of this package. Both models are trained fully in bfloat16. It prints one JSON line
with the seconds of ``train()``, the sampled tokens, tokens per second, and the peak of memory.
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["WANDB_MODE"] = "disabled"

from two_agents import QUESTION


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=8, help="per update")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--critic", choices=["head", "model"], default="head")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    import torch
    from comlrl.trainers.actor_critic import IACConfig, IACTrainer
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    counts: list[int] = []

    def models() -> list:
        return [AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16) for _ in range(2)]

    def reward(first: list[str], second: list[str], **_) -> list[float]:
        counts.extend(len(tokenizer(text).input_ids) for text in (*first, *second))
        return [len(text) % 7 / 7 for text in first]

    prompts = [QUESTION.format(a=number, b=number + 3) for number in range(options.prompts)]
    trainer = IACTrainer(
        agents=models(),
        critics=models() if options.critic == "model" else None,
        tokenizer=tokenizer,
        reward_func=reward,
        formatters=[lambda row: row["prompt"]] * 2,
        args=IACConfig(
            num_train_epochs=1, rollout_buffer_size=options.prompts, max_new_tokens=options.new_tokens, temperature=1.0,
            top_p=1.0, num_turns=1, use_separate_critic=options.critic == "model", eval_interval=10**9, eval_num_samples=1,  # noqa: E501
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "seconds": seconds,
        "tokens": sum(counts),
        "tokens_per_second": sum(counts) / seconds,
        "peak_rss_bytes": peak,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
