"""Each group of an optimizer has the schedule that it would have alone, and weight decay shrinks no norm and no bias."""

import json
from types import SimpleNamespace

import pytest
import torch
from one_policy import small_trainer
from torch import nn

from maporl.errors import ConfigError
from maporl.loops.stages import optimizer_of
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.trained import schedule_of
from trl_ext.sharding.choice import decayed

POLICY, CRITIC = 1e-5, 1e-4
# options, and the two rates after 0, 1, 5 and 10 of 10 updates
SCHEDULES = {
    "constant": ({}, [(1e-5, 1e-4)] * 4),
    "linear": ({}, [(1e-5, 1e-4), (9e-6, 9e-5), (5e-6, 5e-5), (0.0, 0.0)]),
    "polynomial": ({"lr_end": 1e-6}, [(1e-5, 1e-4), (9.1e-6, 9.01e-5), (5.5e-6, 5.05e-5), (1e-6, 1e-6)]),
    "cosine_with_min_lr": ({"min_lr": 1e-6}, [(1e-5, 1e-4), (9.779754e-6, 9.757730e-5), (5.5e-6, 5.05e-5), (1e-6, 1e-6)]),
    "warmup_stable_decay": (
        {"num_decay_steps": 5, "min_lr_ratio": 0.1}, [(1e-5, 1e-4), (1e-5, 1e-4), (1e-5, 1e-4), (1e-6, 1e-5)]
    ),
}  # fmt: skip


def args_of(name, warmup=0, **options):
    return SimpleNamespace(lr_scheduler_type=name, lr_scheduler_kwargs=options, get_warmup_steps=lambda updates: warmup)


def optimizer():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (POLICY, CRITIC, 0.0)]
    return torch.optim.AdamW(groups, lr=3.0)  # the default is nobody's rate


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_end_of_the_schedule_is_that_of_each_rate(name):
    options, wanted = SCHEDULES[name]
    stepped = optimizer()
    schedule, rates = schedule_of(stepped, args_of(name, **options), 10), []
    for update in range(11):
        if update in (0, 1, 5, 10):
            rates.append(tuple(schedule.get_last_lr()))
        stepped.step()
        schedule.step()
    assert [rate[:2] for rate in rates] == [pytest.approx(pair, rel=1e-5, abs=1e-12) for pair in wanted]
    assert {rate[2] for rate in rates} == {0.0}, "what does not learn goes on so"


def test_warm_up_rises_to_each_rate():
    stepped = optimizer()
    schedule = schedule_of(stepped, args_of("polynomial", warmup=2, lr_end=1e-6), 4)
    rates = []
    for _ in range(5):
        rates.append(schedule.get_last_lr()[:2])
        stepped.step()
        schedule.step()
    wanted = [0.0, 0.0], [5e-6, 5e-5], [1e-5, 1e-4], [5.5e-6, 5.05e-5], [1e-6, 1e-6]
    assert rates == [pytest.approx(pair, abs=1e-12) for pair in wanted]


def ppo(tiny, folder, **options):
    saved = {"critic": "model", "learning_rate": POLICY, "save_strategy": "steps", "save_steps": 1}
    return small_trainer(tiny, folder, **saved | options)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_resumed_run_goes_on_with_both_rates(tiny, tmp_path, decay):
    options = {"value_learning_rate": CRITIC, "lr_scheduler_type": "cosine_with_min_lr", "weight_decay": decay}
    options |= {"lr_scheduler_kwargs": {"min_lr": 2e-6}}
    whole = ppo(tiny, tmp_path / "whole", **options)
    whole.train()
    again = ppo(tiny, tmp_path / "whole", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    told = [[(r["lr"], r["critic_lr"]) for r in one.state.log_history if "critic_lr" in r] for one in (whole, again)]
    assert told[0][2:] == told[1] and len(told[0]) == 4 and len(set(told[0])) == 4
    assert again.learners["policy"].scheduler.get_last_lr() == pytest.approx([2e-6] * (3 if decay == 0 else 6))
    for mine, theirs in zip(whole.model.policy.parameters(), again.model.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_rate_that_is_below_its_end_is_refused_before_a_model_loads(tmp_path):
    values = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum", "largest": 9}, "agents": {"ann": {"tiny": {}}, "bob": {"tiny": {}}},
        "training": {"use_cpu": True, "learning_rate": 1e-5, "value_learning_rate": 1e-7, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-6}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"lr_end .* must be smaller.*\(policy 'ann', critic learning rate 1e-07\)"):
        check_run(from_dict(values))


class Model(nn.Module):
    """A model with what weight decay is for, and what it is not for."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.input_layernorm, self.q_norm = nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm(2)
        self.norm, self.embed = nn.RMSNorm(2), nn.Embedding(2, 2)


def test_norms_and_biases_stand_in_groups_without_decay():
    model, head = Model(), nn.Linear(2, 1)
    groups = [{"params": [*model.parameters()], "lr": 1.0}, {"params": [*head.parameters()], "lr": 2.0}]
    names = {id(p): name for name, p in [*model.named_parameters(), *head.named_parameters("head")]}
    assert decayed(groups, [model, head], 0.0) is groups
    cut = [
        (g["lr"], g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in decayed(groups, [model, head], 0.5)
    ]
    assert cut == [
        (1.0, 0.5, ["up_proj.weight", "embed.weight"]),
        (1.0, 0.0, ["up_proj.bias", "input_layernorm.weight", "input_layernorm.bias", "q_norm.weight", "q_norm.bias", "norm.weight"]),
        (2.0, 0.5, ["head.weight"]),
        (2.0, 0.0, ["head.bias"]),
    ]  # fmt: skip


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_an_update_without_advantages_shrinks_matrices_by_the_decay_and_no_norm(tiny, tmp_path, decay):
    options = {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "critic": "none"}
    options |= {"weight_decay": decay, "reward_funcs": lambda completions, **columns: [0.0] * len(completions)}
    trainer = ppo(tiny, tmp_path / "run", total_episodes=4, **options)
    model = trainer.model.policy
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    for name, p in model.named_parameters():
        factor = 1.0 if "norm" in name else 1.0 - 0.1 * decay
        assert torch.allclose(p.detach(), factor * before[name], atol=1e-7), name
    assert any("norm" in name for name in before)


def test_stages_of_a_loop_take_the_runs_decay():
    for decay in (0.0, 0.3):
        config = SimpleNamespace(training=SimpleNamespace(weight_decay=decay))
        groups = optimizer_of(config, Model(), 1e-3).param_groups
        assert {group["weight_decay"] for group in groups} == {0.0, decay} and {g["lr"] for g in groups} == {1e-3}


def test_a_checkpoint_whose_groups_are_others_is_refused_in_one_line(tiny, tmp_path):
    trainer = ppo(tiny, tmp_path / "run", weight_decay=0.1, total_episodes=4)
    trainer.train()
    file = tmp_path / "run/checkpoint-1/policies/policy/optimizer/optimizer.json"
    record = json.loads(file.read_text())
    assert len(record["groups"]) == 6, "policy, value model and head, each cut"
    record["groups"] = record["groups"][:3]
    file.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"has 3 groups of weights and this one has 6\. .* begin another run"):
        trainer.learners["policy"].trained.load(file.parent.parent)
