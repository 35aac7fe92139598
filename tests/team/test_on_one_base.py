"""One call makes a team of adapters on one base: who shares what, what is refused, and that only adapters learn."""

import pytest
import torch
from notebook_runs import ALPHABET, DEBATE, READABLE, TASK, args
from peft import LoraConfig

from maporl import Agent, MultiAgentPPOTrainer, Team
from trl_ext.models.forward import base_of


@pytest.fixture
def base(tiny):
    return tiny(hidden_size=32, layers=1, alphabet=ALPHABET)


def test_agents_have_an_adapter_each_on_one_base(base):
    team = Team.on_one_base(*base, ["ann", Agent("bob", role="critic", system="1")], LoraConfig(r=4))
    ann, bob = team.policies.values()
    assert base_of(ann.model) is base_of(bob.model) and (ann.adapter, bob.adapter) == ("ann", "bob")
    assert (team.agents["bob"].role, team.agents["bob"].system) == ("critic", "1")
    assert {p.peft_type.value for p in ann.model.peft_config.values()} == {"LORA"}
    assert [p.r for p in ann.model.peft_config.values()] == [4, 4]
    ids, logits = torch.tensor([[3, 4, 5]]), []
    for policy in (ann, bob):
        policy.model.eval()
        with torch.no_grad(), policy.active() as model:
            logits.append(model(ids).logits)
    assert torch.equal(*logits), "a new LoRA begins as the identity"


def test_the_adapters_are_those_of_a_configuration_unless_another_is_given(base):
    team = Team.on_one_base(*base, ["ann", Agent("bob", policy="ann"), Agent("hal", engine="human")])
    assert list(team.policies) == ["ann"] and list(team.agents) == ["ann", "bob", "hal"]
    options = team.policies["ann"].model.peft_config["ann"]
    assert (options.r, options.lora_alpha) == (16, 32)
    assert team.policies["ann"].agents == ["ann", "bob"]


@pytest.mark.parametrize(("agents", "message"), [
    ("ann", r"agents: expected a list of names or of Agent, got 'ann'; write \['ann'\]"),
    (["ann", "q_proj"], "agent 'q_proj': 'q_proj' is also the name of a part of its model"),
    ([Agent("ann", adapter="x")], "agent 'ann': it brings a model, adapter or turns"),
])  # fmt: skip
def test_what_does_not_fit_one_base_is_refused(base, agents, message):
    with pytest.raises(ValueError, match=message):
        Team.on_one_base(*base, agents)


def test_only_the_adapters_learn(base, tmp_path):
    model, tokenizer = base
    before = {name: value.clone() for name, value in model.state_dict().items()}
    team = Team.on_one_base(model, tokenizer, ["ann", "bob"])
    first = {name: policy_weights(policy) for name, policy in team.policies.items()}
    MultiAgentPPOTrainer(args(tmp_path / "run"), team, TASK, DEBATE, reward=READABLE).train()
    after = dict(base_of(team.policies["ann"].model).named_parameters())
    kept = [name.replace(".base_layer", "") for name in after if ".lora_" not in name]
    assert sorted(kept) == sorted(name for name in before if name in kept) and kept
    assert all(torch.equal(before[n.replace(".base_layer", "")], after[n]) for n in after if ".lora_" not in n)
    for name, policy in team.policies.items():
        now = policy_weights(policy)
        assert any(not torch.equal(now[key], first[name][key]) for key in now), f"{name} has learned nothing"


def policy_weights(policy):
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if f".{policy.adapter}." in n}
