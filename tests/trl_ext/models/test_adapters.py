"""What belongs to an adapter is what is trained, copied, sent, counted and saved.

PEFT's own forward says what is right.
"""

import copy

import peft
import pytest
import torch
from conformance import METHODS, MORE, adapted, build
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from maporl import Agent, Team
from maporl.config.parse import parse_config
from maporl.errors import ConfigError
from maporl.integrations.ray.messages import pack, sent_parameters, unpack
from maporl.integrations.vllm.checks import check_served
from maporl.rollout.restate import UntrainedWeights
from maporl.team.past_policies import past_of
from trl_ext import Learner, PPOv2Config, PPOv2Trainer
from trl_ext.learning.policy import Policy, starting_point
from trl_ext.models.adapters import (
    AdapterError,
    adapter_parameters,
    adapter_state,
    base_state,
    copy_adapter,
    set_state,
    shared_parameters,
)
from trl_ext.models.lora_sampling import matrices, mixes
from trl_ext.models.weights import WeightsError, add_adapter, read_adapter

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
ADAPTERS = [name for name in METHODS if name != "all weights"]
CHANGED = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


def reward(prompts, completions):
    return [float(len(text)) for text in completions]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def args(tmp_path, **more):
    return PPOv2Config(output_dir=str(tmp_path), report_to=[], use_cpu=True, save_strategy="no", **more)


@torch.no_grad()
def moved(model, adapter="default", scale=0.01):
    """The model after its adapter has learned something."""
    torch.manual_seed(7)
    for parameter in adapter_parameters(model, adapter).values():
        parameter += scale * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_parameters_of_an_adapter_are_those_that_peft_trains(kind, method):
    model = adapted(build(kind)[0], method)
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    assert trained, "PEFT trains something"
    found = adapter_parameters(model, "default")
    assert {id(p) for p in found.values() if p.requires_grad} == trained.keys()
    assert not any("default" in name.split(".") for name in found), "names are those of any adapter of this kind"


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_copy_of_an_adapter_computes_what_it_computes_and_leaves_it_alone(method):
    model = moved(adapted(build("llama")[0], method))
    before = logits(model)
    if shared_parameters(model, "default"):
        with pytest.raises(AdapterError, match="trains biases of its base"):
            copy_adapter(model, "default", "second")
        return
    copy_adapter(model, "default", "second")
    assert torch.equal(logits(model), before), "the policy is as it was"
    assert model.active_adapters == ["default"]
    assert not any(p.requires_grad for p in adapter_parameters(model, "second").values())
    theirs = {id(t) for t in adapter_parameters(model, "second").values()}
    assert not theirs & {id(t) for t in adapter_parameters(model, "default").values()}
    model.set_adapter("second")
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_initialisation_that_has_changed_the_base_is_not_made_twice(init, tmp_path):
    model, tokenizer = build("llama")
    plain = logits(model)
    model = get_peft_model(model, LoraConfig(init_lora_weights=init, **CHANGED))
    torch.testing.assert_close(logits(model), plain, atol=1e-4, rtol=0)
    weights = {name: tensor.clone() for name, tensor in base_state(model).items()}
    learner = Learner(Policy("p", model, tokenizer), args(tmp_path), critic="adapter")
    starting_point(model, "default")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base_state(model).items())
    with learner.policy.reference_model() as reference:
        torch.testing.assert_close(logits(reference), plain, atol=1e-4, rtol=0)
    with learner.policy.active("default_critic") as critic:
        torch.testing.assert_close(logits(critic), plain, atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert (logits(model) - plain).abs().max() > 0.01, (
            "adapters off is another model, so it cannot be the reference"
        )


def test_of_a_trained_bias_the_reference_is_a_copy_of_the_model(tmp_path):
    model = adapted(build("gpt_neox")[0], "LoRA, bias all")
    assert any(name.endswith("mlp.dense_4h_to_h.base_layer.bias") for name in shared_parameters(model, "default"))
    start = logits(model)
    learner = Learner(Policy("p", model, build("gpt_neox")[1]), args(tmp_path))
    moved(model)
    with learner.policy.reference_model() as reference:
        torch.testing.assert_close(logits(reference), start, atol=1e-5, rtol=0)
    untrained = Team([Agent("ann", model, build("gpt_neox")[1])])
    kept = UntrainedWeights.before_training(untrained, 2)
    before = logits(model)
    moved(model, scale=0.1)
    with kept.model_of("ann") as model:
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)


def test_each_of_two_adapters_with_whole_modules_and_tokens_learns_its_own(tmp_path):
    model, tokenizer = build("llama")
    options = LoraConfig(modules_to_save=["lm_head"], trainable_token_indices=[3, 4], **CHANGED)
    shared = get_peft_model(model, options, adapter_name="ann")
    shared.add_adapter("bob", options)
    team = Team([Agent(name, shared, tokenizer, adapter=name) for name in ("ann", "bob")])
    learners = team.build_learners(args(tmp_path, kl_coef=0.0), 1)
    groups = {
        name: [{id(p) for p in group["params"]} for group in learner._groups(None)]
        for name, learner in learners.items()
    }
    for name, other in (("ann", "bob"), ("bob", "ann")):
        own = adapter_parameters(shared, name)
        head = next(p for key, p in own.items() if key.endswith("lm_head.modules_to_save.weight"))
        tokens = next(p for key, p in own.items() if key.endswith("trainable_tokens_delta"))
        assert head.shape == (40, 32) and tokens.shape == (2, 32)
        assert {id(p) for p in own.values()} == groups[name][0]
        assert not groups[name][0] & groups[other][0]
    numbers = {name: trained for name, (_, trained) in team.count_parameters().items()}
    # two layers: rank 8 of q (32 x 32) and v (16 x 32); head; tokens
    size = 2 * (2 * 8 * (32 + 32) - 8 * 16) + 40 * 32 + 2 * 32
    assert numbers == {"ann": size, "bob": size}


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused_by_name_before_anything_is_loaded(kind, tmp_path):
    model, tokenizer = build("llama")
    rows = {"train_dataset": [{"prompt": "1"}] * 8, "reward_funcs": reward}
    config = kind(num_virtual_tokens=3, task_type="CAUSAL_LM")
    name = config.peft_type.value
    with pytest.raises(ValueError, match=f"peft_config: {name} puts virtual tokens before the prompt.*LoraConfig"):
        PPOv2Trainer(args(tmp_path), tokenizer, model, peft_config=config, **rows)
    wrapped = get_peft_model(copy.deepcopy(model), config)
    with pytest.raises(ValueError, match=f"model: its adapter 'default' cannot be used: {name}"):
        PPOv2Trainer(args(tmp_path), tokenizer, wrapped, **rows)
    with pytest.raises(ValueError, match=f"reward_model: its adapter 'default' cannot be used: {name}"):
        PPOv2Trainer(args(tmp_path), tokenizer, model, reward_model=wrapped, **rows)
    with pytest.raises(ValueError, match=f"agent 'ann': model: its adapter 'default' cannot be used: {name}"):
        Team([Agent("ann", wrapped, tokenizer)])
    wrapped.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()  # so that nothing can be loaded
    agent = {"model": str(tmp_path / "model"), "adapter": str(tmp_path / "adapter")}
    parts = {"task": {"name": "arithmetic"}, "protocol": {"name": "debate"}, "output_dir": str(tmp_path / "run")}
    given = parse_config({"agents": {"ann": agent}, **parts})
    with pytest.raises(ConfigError, match=f"agents.ann.adapter: .* cannot be used: {name} puts virtual tokens"):
        Team.from_config(given)


@pytest.mark.parametrize(("kind", "option"), [("llama", {"init_lora_weights": "pissa"}), ("gpt_neox", {"bias": "all"})])
def test_what_changes_the_base_shares_it_with_nobody(kind, option, tmp_path):
    model, tokenizer = build(kind)
    modules = {"llama": ["q_proj"], "gpt_neox": ["query_key_value"]}[kind]
    common = {"target_modules": modules, "task_type": "CAUSAL_LM"}
    shared = get_peft_model(model, LoraConfig(**option, **common), adapter_name="ann")
    shared.add_adapter("bob", LoraConfig(**common))
    with pytest.raises(AdapterError, match=r"adapter 'ann' cannot share its base with 'bob'.*load the model once more"):
        Team([Agent(name, shared, tokenizer, adapter=name) for name in ("ann", "bob")])
    if "bias" not in option:
        alone = get_peft_model(build(kind)[0], LoraConfig(**common), adapter_name="bob")
        saved = get_peft_model(build(kind)[0], LoraConfig(**option, **common))
        saved.save_pretrained(tmp_path)
        with pytest.raises(WeightsError, match=r"adapter 'cat': the initialisation of 'cat' .*'pissa'.* which 'bob'"):
            add_adapter(alone, "cat", LoraConfig(**option, **common))
        with pytest.raises(WeightsError, match="would share; give each a base of its own"):
            read_adapter(alone, str(tmp_path), "cat", True)


def test_a_saved_team_with_its_reduced_base_is_not_reduced_again(tmp_path):
    model, tokenizer = build("llama")
    model = moved(get_peft_model(model, LoraConfig(init_lora_weights="pissa", **CHANGED)))
    before = logits(model)
    Team([Agent("ann", model, tokenizer)]).save(tmp_path / "team")
    loaded = Team.from_pretrained(tmp_path / "team").policies["ann"].model
    torch.testing.assert_close(logits(loaded.eval()), before, atol=1e-5, rtol=1e-5)
    assert model.peft_config["default"].init_lora_weights == "pissa", "the options in memory stay"


@pytest.mark.parametrize("method", ["LoRA, modules_to_save", "LoRA, trained tokens", "IA3", "VeRA", "LoRA, embeddings"])
def test_past_weights_and_weights_that_travel_are_all_of_an_adapter(method):
    model, tokenizer = build("llama")
    team = Team([Agent("ann", adapted(model, method), tokenizer)])
    policy = team.policies["ann"]
    past = past_of(policy, [])
    moved(policy.model, "default")
    now = logits(policy.model)
    snapshot = {name: tensor.detach().clone() for name, tensor in adapter_state(policy.model, "default").items()}
    moved(policy.model, "default", scale=0.1)
    set_state(past.model, past.adapter, snapshot)
    with past.active() as speaking:
        torch.testing.assert_close(logits(speaking), now, atol=1e-6, rtol=0)
    with policy.active() as speaking:
        later = logits(speaking)
    assert (later - now).abs().max() > 1e-3
    sent = sent_parameters(policy)
    unpack(pack(sent.items(), sum(p.nbytes for p in sent.values())), sent_parameters(past))
    with past.active() as speaking:
        torch.testing.assert_close(logits(speaking), later, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("method", "how"),
    [("LoRA", True), ("LoRA, embeddings", False), ("LoRA, lora_bias", False), ("LoRA, trained tokens", False),
     ("IA3", False), ("LoRA, modules_to_save", False), ("DoRA", False), ("LoRA, tied head", False), ("VeRA", False)],
)  # fmt: skip
def test_only_what_is_all_of_an_adapter_is_mixed(method, how):
    model = adapted(build("llama")[0], method)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert mixes(model, "default") is how
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "restored to the bit"


def test_a_tied_head_and_experts_parameters_are_not_mixed(monkeypatch):
    for kind, more, options in (
        ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
        ("mixtral", {}, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ):
        monkeypatch.setitem(MORE, kind, MORE.get(kind, {}) | more)
        model = get_peft_model(build(kind)[0], LoraConfig(task_type="CAUSAL_LM", **options))
        assert not mixes(model, "default")


def test_a_model_that_reads_its_layers_weights_itself_is_not_mixed():
    """The comparison of logits finds what no look at PEFT's layers can."""
    model = get_peft_model(build("llama")[0], LoraConfig(**CHANGED))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.forward = lambda x, *_, **__: torch.nn.functional.linear(x, layer.weight)  # as Mamba reads its dt_proj
    assert matrices(model, "default") is not None
    assert not mixes(model, "default")


def test_vllm_is_given_only_what_it_computes():
    model, tokenizer = build("llama")
    for options, why in (
        (LoraConfig(**CHANGED), None),
        (LoraConfig(trainable_token_indices=[3], **CHANGED), "more than the matrices of linear layers"),
        (IA3Config(feedforward_modules=[], **CHANGED), r"more than the matrices of linear layers \(IA3Config\)"),
        (LoraConfig(init_lora_weights="olora", **CHANGED), "has changed the base, which a server has unchanged"),
    ):
        agent = Agent("ann", get_peft_model(copy.deepcopy(model), options), tokenizer)
        policies = list(Team([agent]).policies.values())
        if why is None:
            check_served(policies)
        else:
            with pytest.raises(ConfigError, match=f"policy 'ann': vLLM would sample from a part of its adapter.*{why}"):
                check_served(policies)


@pytest.mark.parametrize("name", ["keys", "type", "forward", "lora_A", "q_proj", "model", "weight", "base_model"])
def test_an_agent_whose_name_peft_cannot_use_is_named(name, tmp_path):
    agent = {"tiny": {"hidden_size": 32, "layers": 1}, "lora": {"r": 2}}
    parts = {"task": {"name": "arithmetic"}, "protocol": {"name": "debate"}, "output_dir": str(tmp_path / "run")}
    given = parse_config({"agents": {name: agent, "bob": agent}, **parts})
    with pytest.raises(ConfigError, match=f"agents.{name}: '{name}' is also the name of a part.*agents.{name}.policy"):
        Team.from_config(given)


# -- what strangers' adapters have shown --------------------------------------------------------------------------


def trainer(model, tokenizer, tmp_path, **more):
    given = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "total_episodes": 8,
        "response_length": 4,
    }
    rows = [{"prompt": f"{n}+1"} for n in range(8)]
    return PPOv2Trainer(args(tmp_path, **given, **more), tokenizer, model, train_dataset=rows, reward_funcs=reward)


def test_adapters_of_the_user_are_not_taken_for_copies(tmp_path):
    model, tokenizer = build("llama")
    shared = get_peft_model(model, LoraConfig(**CHANGED), adapter_name="ann")
    for name in ("ann_start", "ann_critic"):
        shared.add_adapter(name, LoraConfig(**CHANGED))
        moved(shared, name)
    moved(shared, "ann")
    before = {name: {k: p.clone() for k, p in adapter_state(shared, name).items()} for name in shared.peft_config}
    for needed, option in (("ann_start", {"critic": "none"}), ("ann_critic", {"critic": "adapter", "kl_coef": 0.0})):
        agents = [Agent(n, shared, tokenizer, adapter=n, trainable=n == "ann") for n in shared.peft_config]
        team = Team(agents)
        with pytest.raises(AdapterError, match=f"'{needed}': the copy of 'ann' has this name"):
            team.build_learners(args(tmp_path, **option), 1)
    for name, state in before.items():
        assert all(torch.equal(state[key], tensor) for key, tensor in adapter_state(shared, name).items())


def test_a_later_run_uses_the_copies_of_an_earlier_one_with_the_weights_of_now(tmp_path):
    model, tokenizer = build("llama")
    model = moved(get_peft_model(model, LoraConfig(**CHANGED)))
    for _ in range(2):
        now = logits(model)
        start, policy = starting_point(model, "default"), Policy("p", model, tokenizer)
        learner = Learner(policy, args(tmp_path), critic="adapter", ref_adapter=start)
        past = past_of(Team([Agent("ann", model, tokenizer, adapter="default")]).policies["ann"], [])
        with learner.policy.active(learner.critic.adapter) as critic:
            assert torch.equal(logits(critic), now)
        with learner.policy.reference_model() as reference:
            assert torch.equal(logits(reference), now)
        with past.active() as speaking:
            assert torch.equal(logits(speaking), now)
        model.set_adapter("default")
        moved(model, scale=0.1)


@pytest.mark.parametrize("critic", ["head", "adapter"])
def test_parts_of_an_adapter_that_are_frozen_stay_so(critic, tmp_path):
    """LoRA-FA freezes the A matrices (arXiv 2308.03303)."""
    model, tokenizer = build("llama")
    model = get_peft_model(model, LoraConfig(**CHANGED))
    for name, parameter in adapter_parameters(model, "default").items():
        parameter.requires_grad_("lora_A" not in name)
    before = {name: p.clone() for name, p in adapter_parameters(model, "default").items()}
    trainer(model, tokenizer, tmp_path, critic=critic, learning_rate=1e-2).train()
    still = {name for name, p in adapter_parameters(model, "default").items() if torch.equal(p, before[name])}
    assert still == {name for name in before if "lora_A" in name}


@pytest.mark.skipif(not hasattr(peft, "LilyConfig"), reason="this version of PEFT has no Lily")
def test_an_adapter_that_sees_later_tokens_once_it_has_learned_is_refused(tmp_path):
    model, tokenizer = build("llama")
    model = get_peft_model(model, peft.LilyConfig(r=2, **CHANGED))  # it averages its router over all tokens of a batch
    with pytest.raises(AdapterError, match=r"adapter 'default' \(LilyConfig\) the model sees the tokens that follow"):
        trainer(model, tokenizer, tmp_path)


def test_an_initialisation_that_cannot_be_repeated_is_said(tmp_path, caplog):
    model, tokenizer = build("llama")
    trainer(get_peft_model(model, LoraConfig(init_lora_weights="pissa_niter_4", **CHANGED)), tokenizer, tmp_path)
    assert (
        "the initialisation of adapter 'default' (init_lora_weights='pissa_niter_4') cannot be repeated" in caplog.text
    )


def test_adalora_on_a_half_precision_base_trains_its_matrices(tmp_path):
    model, tokenizer = build("llama")
    options = peft.AdaLoraConfig(total_step=10, **CHANGED)
    model = get_peft_model(model.to(torch.bfloat16), options)
    learner = trainer(model, tokenizer, tmp_path).learners["policy"]
    assert not any("ranknum" in name for name in learner.policy.parameters())


def test_a_failed_copy_leaves_nothing_behind():
    model, _ = build("llama")
    model = get_peft_model(model, LoraConfig(layer_replication=[(0, 1), (0, 2)], **CHANGED))
    now = logits(model)
    copy_adapter(model, "default", "second")
    assert torch.equal(logits(model), now), "the layers are replicated once"
    if not hasattr(peft, "KasaConfig"):
        return
    kasa = moved(get_peft_model(build("llama")[0], peft.LoraConfig(kasa_config=peft.KasaConfig(), **CHANGED)))
    now = logits(kasa)
    with pytest.raises(AdapterError, match="a copy of KaSA would cut its base once more"):
        copy_adapter(kasa, "default", "second")
    assert torch.equal(logits(kasa), now) and list(kasa.peft_config) == ["default"]


def test_a_central_critic_is_a_whole_model_with_the_adapter_in_its_weights(tmp_path):
    model, tokenizer = build("llama")
    model = moved(get_peft_model(model, LoraConfig(**CHANGED)))
    team = Team([Agent("ann", model, tokenizer)])
    critic = team.build_central_critic(args(tmp_path, critic="central"), 1).model
    assert critic.state_dict().keys() == build("llama")[0].state_dict().keys()
    torch.testing.assert_close(logits(critic), logits(model), atol=1e-4, rtol=1e-4)
