"""Measure seconds, memory and work of PPO updates on one policy with a forced completion length.

    python benchmarks/ppo_step.py --model DIR --batch 8 --prompt-len 64 --response-len 64 --epochs 4 --critic head
    --json

``--model tiny`` is a random Llama (width 64, 2 layers, 1024 ids). The work is fixed: prompts are random ids, every
completion has exactly ``--response-len`` tokens, and the reward is a function of the text's length. The result has
``seconds_per_update`` (median), ``seconds_per_phase`` (mean per update), ``tokens_per_second`` (sampled, end to end),
``peak_rss_bytes`` (while training) and ``work``.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder, or 'tiny'")
    parser.add_argument("--batch", type=int, default=8, help="completions per update")
    parser.add_argument("--micro", type=int, default=None, help="rows per forward and backward (default: batch)")
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--critic", choices=["head", "model", "none"], default="head")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", type=int, default=0, help="LoRA rank; 0: full fine-tuning")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON line (otherwise indented)")
    return parser.parse_args()


def load(options: argparse.Namespace):
    """Return the model and the tokenizer of ``--model``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from maporl.config.schema import TinySection
    from maporl.tiny import build_tiny_tokenizer

    dtype = getattr(torch, options.dtype)
    if options.model != "tiny":
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(options.model)
    torch.manual_seed(options.seed)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(shape).to(dtype), build_tiny_tokenizer(TinySection())


class PeakMemory:
    """Measures the largest resident memory of this process while the block runs, every 10 ms."""

    def __enter__(self):
        import psutil

        self._process, self._stop, self.bytes = psutil.Process(), threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def main() -> None:
    options = parse()
    import torch

    torch.set_num_threads(options.threads)
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    from trl_ext import PPOv2Config, PPOv2Trainer

    model, tokenizer = load(options)
    generator = torch.Generator().manual_seed(options.seed)
    highest = min(model.config.get_text_config().vocab_size, 40000)
    shape = (options.batch * options.updates, options.prompt_len)
    prompts = torch.randint(100, highest, shape, generator=generator).tolist()
    micro = options.micro or options.batch
    peft_config = None
    if options.lora:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    args = PPOv2Config(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=options.batch // micro,
        num_mini_batches=options.mini_batches,
        num_ppo_epochs=options.epochs,
        total_episodes=options.batch * options.updates,
        response_length=options.response_len,
        stop_token="none",
        temperature=1.0,
        learning_rate=1e-6,
        critic=options.critic,
        gradient_checkpointing=options.gradient_checkpointing,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=options.seed,
    )
    records: list[dict] = []
    ends: list[float] = []

    class Record(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            records.append(dict(logs))

        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    trainer = PPOv2Trainer(
        args,
        tokenizer,
        model,
        train_dataset=[{"input_ids": ids} for ids in prompts],
        reward_funcs=lambda prompts, completions, **columns: [float(len(text) % 7) for text in completions],
        callbacks=[Record()],
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)  # standard output has the result only
    with PeakMemory() as memory:
        started = time.perf_counter()
        trainer.train()
    seconds = [end - begin for begin, end in zip([started, *ends], ends, strict=False)]
    phases = sorted({k for entry in records for k in entry if k.startswith("time/")})
    sampled = options.batch * options.response_len
    result = {
        "seconds_per_update": statistics.median(seconds),
        "seconds_per_phase": {k.removeprefix("time/"): statistics.mean(entry[k] for entry in records) for k in phases},
        "tokens_per_second": sampled / statistics.median(seconds),
        "peak_rss_bytes": memory.bytes,
        "work": {
            "updates": len(seconds),
            "answers_per_update": options.batch,
            "sampled_tokens_per_update": sampled,
            "trained_tokens_per_update": options.batch * (options.prompt_len + options.response_len) * options.epochs,
            "optimizer_steps_per_update": options.epochs * options.mini_batches,
            "policy_parameters": sum(p.numel() for p in model.parameters()),
            "trained_parameters": sum(p.numel() for g in trainer.optimizer.param_groups for p in g["params"]),
            "first_ratio": records[0]["val/first_ratio"],
        },
        "options": vars(options),
        "torch": torch.__version__,
    }
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
