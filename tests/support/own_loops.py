"""A loop of the user's own around the trainer of one policy."""

import torch
from one_policy import QUESTIONS, config, count_a
from peft import LoraConfig, get_peft_model

from trl_ext import PPOv2Trainer


def trainer_of(tiny, folder, lora=False, data=QUESTIONS, **options):
    model, tokenizer = tiny()
    if lora:
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer_options = {name: options.pop(name) for name in ("reward_funcs", "sampler") if name in options}
    args = config(folder, **options)
    return PPOv2Trainer(args, tokenizer, model, train_dataset=data, **{"reward_funcs": count_a} | trainer_options)


def weights(trainer):
    learner = trainer.learners["policy"]
    own = {name: value.clone() for name, value in learner.model.state_dict().items()}
    return own | {f"head.{name}": value.clone() for name, value in learner.value_head.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())
