"""Code of the user's may edit what it is given: no row changes by it."""

from dataclasses import dataclass, field

import pytest
import torch
from fast_cases import some

from maporl import Agent, Arithmetic, Baseline, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from maporl.advantages import BASELINES
from maporl.config.schema import AdvantageConfig, RewardSection
from maporl.rewards.rules import Rule
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.copies import is_users, own_copy
from trl_ext.ppo.losses import OBJECTIVES


@dataclass(frozen=True)
class Row:
    ids: list
    more: dict = field(default_factory=dict)


class Shared:
    pass


def test_a_copy_is_equal_and_nothing_in_it_is_shared_that_can_be_edited():
    shared = Shared()
    row = Row([1, 2], {"a": [{"b": (1, [2])}], "t": torch.ones(2), "s": shared})
    copy = own_copy([row, (1, "x"), None, shared])
    assert copy[0].ids == [1, 2] and copy[0].more["a"] == [{"b": (1, [2])}] and copy[1:] == [(1, "x"), None, shared]
    copy[0].ids.append(3)
    copy[0].more["a"][0]["b"][1].append(3)
    copy[0].more["t"].zero_()
    assert row.ids == [1, 2] and row.more["a"] == [{"b": (1, [2])}] and row.more["t"].tolist() == [1, 1]
    assert copy[0].more["s"] is shared, "an environment stays the same"


def test_code_is_the_users_if_no_package_of_this_one_has_it():
    assert is_users(test_code_is_the_users_if_no_package_of_this_one_has_it, "maporl", "trl_ext")
    assert not is_users(own_copy, "trl_ext") and not is_users(BASELINES["mean"].compute, "maporl")


def plain(prompts, completions, completion_ids, answer, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def editing(prompts, completions, completion_ids, answer, **columns):
    values = plain(prompts, completions, completion_ids, answer)
    for ids, prompt in zip(completion_ids, prompts, strict=True):
        ids.clear()
        prompt.append({"role": "user", "content": "edited"})
    completions.clear()
    answer.clear()
    return values


def weights_after(tiny, folder, function):
    model, tokenizer = tiny(hidden_size=32, layers=1)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    args = PPOv2Config(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=1, total_episodes=8, response_length=3,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=1e-2, kl_coef=0.0,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i)} for i in range(8)]
    PPOv2Trainer(args, tokenizer, model, train_dataset=rows, reward_funcs=[function, plain]).train()
    assert all(len(row["prompt"]) == 1 for row in rows)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_reward_function_that_edits_what_it_is_given_trains_as_one_that_does_not(tiny, tmp_path):
    both = [weights_after(tiny, tmp_path / f.__name__, f) for f in (plain, editing)]
    assert torch.equal(*both)


def scores(dialogues, task):
    return [[float(len(u.response_ids)) for u in d.utterances] for d in dialogues]


def edits(dialogues, task):
    values = scores(dialogues, task)
    for d in dialogues:
        for u in d.utterances:
            u.response_ids.clear()
            u.prompt_ids.append(5)
            u.messages.clear()
            u.rewards["label"] = 9.0
            u.trainable = False
        d.utterances.pop()
    return values


@dataclass(frozen=True)
class Keep(Rule):
    edit: bool = False

    def __call__(self, dialogues, credits):
        own = [dict(credit) for credit in credits]
        if self.edit:
            for d, credit in zip(dialogues, credits, strict=True):
                credit.clear()
                for u in d.utterances:
                    u.response_ids[:] = [3]
                    u.rewards["score"] = -1.0
        return own


def loss(new, old, advantages, mask, options):
    return -(new - old).exp() * advantages * mask, {}


def editing_loss(new, old, advantages, mask, options):
    losses = loss(new.clone(), old.clone(), advantages.clone(), mask.clone(), options)
    with torch.no_grad():
        new.mul_(3.0)
    old.zero_()
    advantages.fill_(7.0)
    mask.fill_(False)
    return losses


def zero(returns, groups, weights, batch, config, state):
    return torch.zeros_like(returns)


def editing_zero(returns, groups, weights, batch, config, state):
    found = torch.zeros_like(returns)
    returns.fill_(3.0)
    weights.zero_()
    batch.reward[:] = [5.0] * len(batch.reward)
    return found


def team_after(tiny, folder, monkeypatch, edited):
    monkeypatch.setitem(OBJECTIVES, "mine", editing_loss if "objective" in edited else loss)
    monkeypatch.setitem(BASELINES, "mine", Baseline(editing_zero if "baseline" in edited else zero))
    monkeypatch.setitem(__import__("maporl").RULES, "keep", Keep)
    team = Team([Agent(name, *tiny(seed=n, hidden_size=32, layers=1)) for n, name in enumerate(("ann", "bob"))])
    args = MultiAgentPPOConfig(
        output_dir=str(folder), total_episodes=8, per_device_train_batch_size=4, gradient_accumulation_steps=1, response_length=3,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=1e-2, objective="mine", critic="none", dialogues_logged=8,
    )  # fmt: skip
    trainer = MultiAgentPPOTrainer(
        args, team, Arithmetic(largest=9), Debate(turns=2, later="{others};{question}", quote="{text}"),
        reward=RewardSection(sources={"label": 1.0, "mine": 1.0}, rules=[{"keep": {"edit": "rule" in edited}}]),
        advantage=AdvantageConfig(returns="utterance", baseline="mine", scale="none", key=["prompt", "agent"]),
        sources={"mine": edits if "source" in edited else scores},
    )  # fmt: skip
    trainer.train()
    records = (folder / "dialogues.jsonl").read_text()
    parts = [p.detach().flatten() for policy in team.policies.values() for p in policy.model.parameters()]
    return torch.cat(parts), [line.split('"utterances"')[1] for line in records.splitlines()]


@pytest.mark.parametrize(
    "edited", some(["source", "rule", "objective", "baseline", "source rule objective baseline"], 4)
)
def test_no_row_of_a_team_changes_by_what_users_code_edits(tiny, tmp_path, monkeypatch, edited):
    weights, said = team_after(tiny, tmp_path / "plain", monkeypatch, "")
    others, told = team_after(tiny, tmp_path / "edited", monkeypatch, edited)
    assert torch.equal(weights, others) and said == told
