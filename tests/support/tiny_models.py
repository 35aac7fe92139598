"""Tiny models of architectures that configurations do not build, and what is asked of them, in tokens."""

import random
from dataclasses import replace

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from trl_ext import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.sampling import sample as module
from trl_ext.sampling.request import Draw, TokenRequest


def build(tiny, architecture):
    """A tiny model and a tokenizer. Gemma 2 caps logits and has sliding windows; GPT-2 has learned positions."""
    model, tokenizer = tiny()
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    if architecture == "gemma2":
        config = Gemma2Config(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, sliding_window=8, final_logit_softcapping=3.0, attn_implementation="eager", **size,
        )  # fmt: skip
        return Gemma2ForCausalLM(config), tokenizer
    if architecture == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **size)), tokenizer
    return model, tokenizer


def lively(model):
    """The model with larger weights, so that greedy completions have different tokens."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model.eval()


def build_any(tiny, kind, attention="sdpa", dtype=torch.float64, **more):
    """A tiny model of any of transformers' decoders, with weights that make tokens matter to each other."""
    _, tokenizer = tiny()
    size = {
        "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{key: value for key, value in {**size, **more}.items() if value is not None})
    return lively(AutoModelForCausalLM.from_config(config, attn_implementation=attention)).to(dtype), tokenizer


def words(generator, least, most):
    return [generator.randrange(3, 20) for _ in range(generator.randint(least, most))]


def answers(seed=0):
    """Three prompts with five answers each, of which two go on: one by another turn, and one by three ways to go on."""
    generator = random.Random(seed)
    found = []
    for group in range(3):
        prompt = words(generator, 9, 12)
        for number in range(5):
            answer = words(generator, 1, 5)
            found.append(Completion(prompt, answer, True, f"{group}.{number}", group=(group,), head=0))
            said = prompt + answer + words(generator, 1, 3)
            for turn in range((0, 1, 3, 0, 0)[number]):
                found.append(Completion(said, words(generator, 2, 4), True, f"{group}.{number}.{turn}", head=1))
    found.append(replace(found[2], label="the same answer again"))
    generator.shuffle(found)
    return [replace(c, weight=1.0 + i % 3, trajectory=(i // 2,)) for i, c in enumerate(found)]


def filled(learner, completions, seed=4):
    """A token batch with everything that the loss reads, and a value mask that leaves out some tokens."""
    rows = build_token_batch(completions, "cpu")
    learner.annotate(rows)
    generator = torch.Generator().manual_seed(seed)
    shape = rows.sampled_mask.shape
    rows.advantages, rows.returns = (
        torch.randn(shape, generator=generator).to(rows.old_logprobs.dtype) * rows.sampled_mask for _ in range(2)
    )
    rows.value_mask &= torch.rand(shape, generator=generator) < 0.7
    return rows


def gradient_of(learner, rows, *more):
    measures = learner.accumulate(rows, torch.arange(len(rows)))
    modules = [m for m in (learner.model, learner.value_head, learner.critic.model, *more) if m is not None]
    found = {id(p): p for module in modules for p in module.parameters() if p.grad is not None}
    return measures, torch.cat([p.grad.flatten().double() for p in found.values()])


OPTIONS = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "cliprange": 10.0, "cliprange_value": 10.0}
"""With such clip ranges the gradient has no kinks, at which rounding would decide."""


class Plain:
    """Stands in for accelerate: one process, full precision."""

    device = torch.device("cpu")
    mixed_precision = "no"


def learner_of(model, tokenizer, folder, critic="head", **options):
    defaults = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "temperature": 1.0, "max_grad_norm": 0}
    args = PPOv2Config(**{**defaults, "per_device_train_batch_size": 16, **options})
    torch.manual_seed(5)
    learner = Learner(Policy("policy", model, tokenizer), args, critic=critic, outputs=3)
    learner.prepare(Plain(), updates=1)
    if learner.value_head is not None:
        torch.nn.init.normal_(learner.value_head.linear.weight)
    return learner


def asked(prompts, draw, keys=None, policies=None, read=None):
    """Return a request for each of ``prompts``. ``draw`` may be one for each."""
    nothing = [None] * len(prompts)
    draws = [draw] * len(prompts) if isinstance(draw, Draw) else draw
    columns = zip(policies or nothing, prompts, draws, keys or nothing, read or [0] * len(prompts), strict=True)
    return [TokenRequest(*one) for one in columns]


def sample(model, prompts, draw, keys=None, adapters=None, states=None, read=None, tokenizer=None, **options):
    """Sample a completion for each of ``prompts``. A policy has the name of its adapter in ``adapters``."""
    requests = asked(prompts, draw, keys, adapters, read)
    adapters = None if adapters is None else {name: name for name in adapters}
    return module.sample(model, requests, dict.fromkeys(adapters or [None], tokenizer), adapters=adapters,
                         states=states, **options)  # fmt: skip
