"""A trainer of one policy: questions, options, and a reward that counts a letter.

As a program this trains one with per-token rewards and several completions a prompt::

    torchrun --nproc_per_node 2 tests/support/one_policy.py OUT ROWS_OF_A_PROCESS [fails]

It writes the weights and the metrics from the main process. With ``fails`` a reward fails on the completions that the
main process alone shows.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.process import distributed

QUESTIONS = [{"prompt": f"{i}+1=", "number": i} for i in range(16)]


def count_a(prompts, completions, **columns):
    return [text.count("a") / 4 for text in completions]


def config(folder, **options):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "total_episodes": 32,
        "response_length": 6, "learning_rate": 1e-3, "temperature": 0.9, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    return PPOv2Config(**{**defaults, **options})


def trainer_of(tiny, folder, lora=False, data=QUESTIONS, **options):
    model, tokenizer = tiny()
    if lora:
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    parts = ("reward_funcs", "reward_weights", "sampler", "eval_dataset")
    trainer_options = {name: options.pop(name) for name in parts if name in options}
    args = config(folder, **options)
    return PPOv2Trainer(args, tokenizer, model, train_dataset=data, **{"reward_funcs": count_a} | trainer_options)


def letters(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def small_trainer(tiny, folder, **options):
    """A trainer of a smaller model, which reads 16 questions once, four at a time."""
    small = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "total_episodes": 16, "response_length": 3,
        "kl_coef": 0.0, "num_ppo_epochs": 1, "reward_funcs": letters,
    }  # fmt: skip
    return trainer_of(lambda: tiny(hidden_size=32, layers=1), folder, **small | options)


def weights(trainer):
    learner = trainer.learners["policy"]
    own = {name: value.clone() for name, value in learner.model.state_dict().items()}
    return own | {f"head.{name}": value.clone() for name, value in learner.value_head.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def classifier(tokenizer, seed=0, size=None, labels=1):
    """A sequence-classification model with one output, as TRL's reward and value models, and verifiers."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=size or len(tokenizer), num_labels=labels, pad_token_id=0)
    return LlamaForSequenceClassification(config)


def saved_verifier(tokenizer, folder, labels=1, dtype=torch.float32):
    """The path of a folder with a random verifier and its tokenizer."""
    classifier(tokenizer, labels=labels).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class StopAfter(TrainerCallback):
    """Ends training after update ``step``; with None it goes on to its end."""

    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


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
