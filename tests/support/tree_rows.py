"""Rows that begin alike, and the gradient that they give."""

import random
from dataclasses import replace

import torch

from trl_ext.ppo.batch import Completion, build_token_batch


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
