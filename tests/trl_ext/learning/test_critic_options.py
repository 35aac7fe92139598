"""The options of critics: further steps, frozen attention, and lambdas of their own, through the trainer of one
policy."""

import copy

import pytest
import torch
from one_policy import QUESTIONS, config, count_a
from peft import LoraConfig, get_peft_model

from trl_ext import PPOv2Trainer
from trl_ext.learning.central_critic import CentralCritic
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.ppo.options import PPOOptions


def trained(model, tokenizer, folder, **options):
    args = config(folder, total_episodes=16, num_ppo_epochs=1, num_mini_batches=2, **options)
    trainer = PPOv2Trainer(
        args=args, processing_class=tokenizer, model=model, reward_funcs=count_a, train_dataset=QUESTIONS
    )
    trainer.train()
    return trainer


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("critic", ["model", "head", "adapter"])
def test_further_steps_of_a_critic_leave_the_policy_as_it_is(tiny, tmp_path, critic):
    """Two steps for each of the policy's, as in SAO, of which the critic alone makes the second."""
    model, tokenizer = tiny()
    if critic == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    # else the policy would feel the critic's further steps: through its trunk, and by the norm that is clipped
    apart = {"detach_critic": True, "max_grad_norm": 0.0}
    options = {"critic": critic, "value_learning_rate": 1e-2, "vf_coef": 0.5, "kl_coef": 0.0, **apart}
    runs = [trained(copy.deepcopy(model), tokenizer, tmp_path / str(k), critic_updates=k, **options) for k in (1, 2)]
    learners = [run.learners["policy"] for run in runs]
    policies = [learner.policy.parameters() for learner in learners]
    heads = [learner.value_head.linear.weight for learner in learners]
    assert all(torch.equal(one, policies[1][name]) for name, one in policies[0].items() if one.requires_grad)
    assert not torch.equal(*heads)
    for learner, steps in zip(learners, (2, 4), strict=True):
        made = {float(learner.optimizer.state[p]["step"]) for p in learner.critic.parameters()[-1]}
        assert made == {steps}
        assert float(learner.optimizer.state[learner.trained.parameters[0]]["step"]) == 2


def is_attention(name):
    return ".self_attn." in name


@pytest.mark.parametrize("critic", ["model", "adapter"])
def test_frozen_attention_of_a_critic_stays_as_it_is(tiny, tmp_path, critic):
    """As SAO freezes it."""
    model, tokenizer = tiny("qwen3")
    if critic == "adapter":
        lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, lora)
    trainer = trained(model, tokenizer, tmp_path, critic=critic, critic_freeze="attention", value_learning_rate=1e-2)
    learner = trainer.learners["policy"]
    start = tiny("qwen3")[0]
    if critic == "model":
        now, before = weights(learner.critic.model), weights(start)
        moved = {name for name, value in now.items() if name in before and not torch.equal(value, before[name])}
        assert moved == {name for name in before if not is_attention(name) and "lm_head" not in name}
    else:
        learning = {id(p) for p in learner.critic.parameters()[-1]}
        named = {name: p for name, p in model.named_parameters() if f".{learner.critic.adapter}." in name}
        assert {name for name, p in named.items() if id(p) in learning} == {n for n in named if "up_proj" in n}
        assert not any(p.requires_grad for name, p in named.items() if "q_proj" in name)
        with learner.policy.active(learner.critic.adapter), learner.policy.active():
            assert not any(p.requires_grad for name, p in named.items() if "q_proj" in name), (
                "also once it was on again"
            )


def test_the_attention_of_a_central_critic_can_be_frozen_too(tiny, tmp_path):
    model, _ = tiny()
    critic = CentralCritic(model, config(tmp_path, critic="central", critic_freeze="attention"))
    learning = {name for name, p in critic.model.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if not is_attention(name)}


def rows_with(values, scores):
    rows = build_token_batch(
        [Completion([1], [3] * len(own), True, "row", group=(n,), score=s) for n, (own, s) in enumerate(zip(values, scores, strict=True))],
        "cpu",
    )  # fmt: skip
    for row, own in enumerate(values):
        rows.values[row, rows.sampled_mask[row]] = torch.tensor(own)
    return rows


def test_a_lambda_that_adapts_to_the_length_and_a_critics_own(tiny, tmp_path):
    """As in VAPO. Four tokens and alpha 0.5: lambda is 1 - 1 / (0.5 * 4) = 0.5. Two tokens: 1 - 1 / (0.5 * 2) = 0.

    The first row's temporal differences are 0.1, -0.2, 0.4 and 0.2, and 0.2; 0.4 + 0.5 * 0.2 = 0.5; -0.2 + 0.5 * 0.5 =
    0.05; 0.1 + 0.5 * 0.05 = 0.125. With the critic's lambda of 1 its targets are the outcome.
    """
    values = [[0.5, 0.6, 0.4, 0.8], [0.3, 0.9]]
    rows = rows_with(values, [1.0, 0.0])
    options = PPOOptions(lam_alpha=0.5, lam_critic=1.0, kl_coef=0.0)
    from trl_ext.ppo.advantages import token_gae

    token_gae(rows, options, has_critic=True)
    assert rows.advantages[0, 1:].tolist() == pytest.approx([0.125, 0.05, 0.5, 0.2], abs=1e-6)
    assert rows.advantages[1, 1:3].tolist() == pytest.approx([0.6, -0.9], abs=1e-6)
    assert rows.returns[0, 1:].tolist() == pytest.approx([1.0] * 4) and rows.returns[1, 1:3].tolist() == [0.0, 0.0]
    # the same lambda, written out, gives the same targets where the critic has none of its own
    rows.returns = torch.zeros_like(rows.returns)
    token_gae(rows, PPOOptions(lam_alpha=0.5, kl_coef=0.0), has_critic=True)
    assert rows.returns[0, 1:].tolist() == pytest.approx([0.625, 0.65, 0.9, 1.0], abs=1e-6)
