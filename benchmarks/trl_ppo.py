"""Measure updates of TRL 1.12's PPOTrainer on the work of ``ppo_step.py``. ``compare_with_trl_ppo.py`` starts this.

    VENV/bin/python benchmarks/trl_ppo.py --model DIR --dtype bfloat16 [--lora 16]

VENV has TRL 1.12, the last version with this trainer, and nothing of this package. As TRL's trainer wants, the value
model is as large as the policy, and rewards come from a model, which is tiny here. It prints one JSON line with the
seconds of each update (``update_s``) and the peak of memory (``peak_rss_mb``).
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from itertools import pairwise

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from ppo_step import PeakMemory


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a causal language model")
    parser.add_argument("--batch", type=int, default=8, help="completions per update")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", type=int, default=0, help="LoRA rank of the policy; 0: full fine-tuning")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        LlamaConfig,
        LlamaForSequenceClassification,
        TrainerCallback,
    )  # fmt: skip
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):  # the trainer masks whatever is padding
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.bos_token
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    words = policy.config.vocab_size
    rewards = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=words, num_labels=1,  # noqa: E501
        max_position_embeddings=4096, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    shape = (options.batch * options.updates, options.prompt_len)
    prompts = Dataset.from_dict({"input_ids": torch.randint(100, min(words, 40000), shape).tolist()})
    lora = LoraConfig(
        r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM"
    )  # fmt: skip
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.batch, num_mini_batches=1, kl_coef=0.05,
            num_ppo_epochs=options.epochs, total_episodes=shape[0], response_length=options.response_len,
            temperature=1.0, learning_rate=1e-6, num_sample_generations=0, bf16=False, gradient_checkpointing=False,
            report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), seed=0, disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=None if options.lora else AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
        reward_model=LlamaForSequenceClassification(rewards),
        value_model=AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype=dtype),
        train_dataset=prompts,
        eval_dataset=prompts.select([0]),
        peft_config=lora if options.lora else None,
        callbacks=[Ends()],
    )  # fmt: skip
    with PeakMemory() as memory, contextlib.redirect_stdout(sys.stderr):
        started = time.perf_counter()
        trainer.train()
    seconds = [end - begin for begin, end in pairwise([started, *ends])]
    print(json.dumps({"update_s": seconds, "peak_rss_mb": memory.bytes / 2**20}))


if __name__ == "__main__":
    main()
