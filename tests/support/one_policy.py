"""A trainer of one policy: questions, options, and a reward that counts a letter."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from trl_ext import PPOv2Config, PPOv2Trainer

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
