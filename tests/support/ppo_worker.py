"""Trains one policy with per-token rewards and several completions a prompt; started by
tests/trl_ext/trainer/test_loop.py.

    torchrun --nproc_per_node 2 tests/support/ppo_worker.py OUT ROWS_OF_A_PROCESS [fails]

Writes the weights and the metrics from the main process. With ``fails`` a reward fails on the completions that the main
process alone shows.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.process import distributed


def tokens(prompts, completions, completion_ids, **columns):
    """Some tokens are worth something. None: a completion that begins with an odd token has no such reward."""
    return [[token % 3 / 4 for token in ids] if ids[0] % 2 == 0 else None for ids in completion_ids]


def length(prompts, completions, **columns):
    if "fails" in sys.argv and len(completions) == 3:  # the whole evaluation set
        raise ValueError("no reward today")
    return [len(text) / 10 for text in completions]


def main() -> None:
    out = Path(sys.argv[1])
    torch.manual_seed(1)
    section = TinySection(hidden_size=64, layers=2)
    tokenizer = build_tiny_tokenizer(section)
    rows = [{"prompt": f"{n}+1="} for n in range(10)]
    args = PPOv2Config(
        output_dir=str(out / "run"), per_device_train_batch_size=int(sys.argv[2]), total_episodes=48, num_generations=4,
        critic_warmup=1, stop_strings=["7"], response_length=8, learning_rate=1e-3, missing_eos_penalty=0.5, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    trainer = PPOv2Trainer(
        args, tokenizer, build_tiny_model(section, tokenizer), train_dataset=rows, eval_dataset=rows[:3],
        reward_funcs=[tokens, length], reward_weights=[2.0, 1.0],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    if distributed.is_main():
        save_file(
            {n: p.detach().contiguous() for n, p in trainer.learners["policy"].model.named_parameters()}, out / "w"
        )
        names = ("objective/scores", "reward/tokens", "reward/length", "eval_score", "episode", "epoch")
        log = [{k: v for k, v in entry.items() if k in names} for entry in trainer.state.log_history]
        (out / "metrics.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main()
