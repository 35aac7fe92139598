"""``attn_implementation``: it reaches every model that a run loads, the numbers are eager's, and what cannot be is
refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fast_cases import some
from folders import ROOT
from one_policy import saved_verifier
from tiny_models import OPTIONS, answers, build_any, filled, gradient_of, learner_of
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from maporl.errors import ConfigError, refuse
from maporl.run import ResolvedRun
from maporl.runs.build import build_trainer
from maporl.team import memory, model_checks
from maporl.team.loading import base_owners
from maporl.team.team import Team
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run
from trl_ext.models import attention
from trl_ext.models.forward import base_of, tree_limits
from trl_ext.models.weights import WeightsError, read_model

ALPHABET = "0123456789+=Answer:; "


@pytest.fixture
def folder(tiny, tmp_path):
    model, tokenizer = tiny(alphabet=ALPHABET, context=256)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def verifier(tiny, tmp_path):
    _, tokenizer = tiny(alphabet=ALPHABET, context=256)
    return saved_verifier(tokenizer, tmp_path / "verifier")


def values_of(tmp_path, agent, **more):
    return {
        "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum"}, "evaluation": {"questions": 0}, "updates": 1,
        "agents": dict.fromkeys(("ann", "bob"), agent), "protocol": {"name": "debate", "turns": 1},
        "ppo": {"response_length": 3, "temperature": 1.0}, "training": {"use_cpu": True, **more.pop("training", {})}, **more,
    }  # fmt: skip


def kind_of(model):
    return base_of(model).config._attn_implementation


@pytest.mark.parametrize(("critic", "adapted"), some([("head", True), ("model", False), ("central", True)], 2))
def test_the_implementation_reaches_every_model_of_a_run(folder, verifier, tmp_path, critic, adapted):
    agent = {"model": str(folder), "attn_implementation": "eager", "critic": critic} | ({"lora": {}} if adapted else {})
    section = {"model": verifier, "attn_implementation": "eager", "learn_every": 1}
    reward = {"sources": {"verifier": 1.0}, "verifier": section}
    config = from_dict(values_of(tmp_path, agent, reward=reward))
    check_run(config)
    trainer = build_trainer(config)
    found = {}
    for name, learner in trainer.learners.items():
        parts = {"policy": learner.model, "reference": learner.reference, "critic": learner.critic.model}
        found |= {f"{name}'s {what}": kind_of(part) for what, part in parts.items() if part is not None}
    if trainer.learning.central is not None:
        found["central critic"] = kind_of(trainer.learning.central.model)
    found["verifier"] = kind_of(trainer.player.scorer.sources["verifier"].learning.verifier.model)
    assert set(found.values()) == {"eager"}, found
    assert len(found) == 3 + (2 if critic == "model" else critic == "central") + (0 if adapted else 2)
    trainer.train()


@pytest.mark.slow
def test_a_resumed_run_and_a_saved_team_keep_it(tmp_path, folder):
    agent = {"model": str(folder), "attn_implementation": "eager"}
    trainer = build_trainer(from_dict(values_of(tmp_path, agent, training={"save_steps": 1})))
    trainer.train()
    again = build_trainer(load(str(tmp_path / "run/config.yaml")))
    again.train(resume_from_checkpoint=True)
    assert {kind_of(learner.model) for learner in again.learners.values()} == {"eager"}
    again.team.save(tmp_path / "team")
    assert "attn_implementation: eager" in (tmp_path / "team/config.yaml").read_text()
    team = Team.from_pretrained(tmp_path / "team")
    assert {kind_of(policy.model) for policy in team.policies.values()} == {"eager"}


def test_bases_of_two_implementations_are_not_shared(tmp_path):
    agents = {name: {"model": "m", "lora": {}} for name in ("ann", "bob")}
    agents["bob"]["attn_implementation"] = "eager"
    config = from_dict(values_of(tmp_path, {}, agents=agents))
    assert list(base_owners(config).values()) == ["ann", "bob"]
    agents["bob"] |= {"policy": "ann"}
    with pytest.raises(ConfigError, match="share policy 'ann' but differ in attn_implementation: None and 'eager'"):
        from_dict(values_of(tmp_path, {}, agents=agents))


# -- equal numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tree", [True, False])
def test_sdpa_computes_what_eager_computes(tiny, tmp_path, monkeypatch, kind, tree):
    """Log-probabilities, the loss's gradient and the weights after a step, by the learner's own methods in float32."""
    if not tree:
        monkeypatch.setattr("trl_ext.learning.learner.tree_limits", lambda model: None)
    found = []
    for name in ("eager", "sdpa"):
        model, tokenizer = build_any(tiny, kind, name, torch.float32)
        assert kind_of(model) == name and tree_limits(model) is not None
        learner = learner_of(model, tokenizer, tmp_path, critic="head", **OPTIONS)
        rows = filled(learner, answers())
        gradient = gradient_of(learner, rows)[1]
        learner.step()
        found.append((rows.old_logprobs, gradient, torch.cat([p.detach().flatten() for p in model.parameters()])))
    for eager, sdpa in zip(*found, strict=True):
        torch.testing.assert_close(sdpa, eager, atol=1e-5, rtol=1e-5)
    assert found[0][1].abs().max() > 1e-3


@pytest.mark.slow
def test_flex_attention_reads_what_eager_reads(tiny, tmp_path):
    """A CPU has its forward pass only, and compiles it for half a minute. So this asks for log-probabilities."""
    found = []
    for name in ("eager", "flex_attention"):
        model, tokenizer = build_any(tiny, "llama", name, torch.float32)
        options = {**OPTIONS, "num_mini_batches": 2}  # so that no graph is kept
        learner = learner_of(model, tokenizer, tmp_path, critic="none", **options)
        assert (tree_limits(model) is None) == (name == "flex_attention")
        found.append(filled(learner, answers()).old_logprobs)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "message"), [
    ("flash_attention_2", "needs the package flash-attn; install it with: pip install flash-attn .* or choose sdpa"),
    ("flash_attention_3", "expected flash_attention_2, which is the only flash attention .* got 'flash_attention_3'"),
    ("kernels-community/flash-attn2", "code from another repository, and such code is never run here; choose sdpa"),
    ("flex_attention", "flex_attention computes no gradients on a CPU, where this run trains; choose sdpa"),
    ("spda", "expected eager, sdpa, flash_attention_2 or flex_attention, got 'spda'"),
    (7, "attn_implementation: expected a text"),
])  # fmt: skip
@pytest.mark.parametrize("place", ["agents.ann", "reward.verifier"])
def test_what_cannot_be_is_refused_before_a_model_loads(folder, verifier, tmp_path, monkeypatch, place, name, message):
    monkeypatch.setattr("trl_ext.models.weights.read_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    chosen = {"attn_implementation": name}
    agent = {"model": str(folder)} | (chosen if place == "agents.ann" else {})
    section = {"model": verifier} | (chosen if place != "agents.ann" else {})
    reward = {"sources": {"verifier": 1.0}, "verifier": section}
    with pytest.raises(ConfigError, match=message) as error:
        check_run(from_dict(values_of(tmp_path, agent, reward=reward)))
    assert f"{place}.attn_implementation: " in str(error.value) and "\n" not in str(error.value)


def refuse_models(config):
    return refuse(model_checks.check(ResolvedRun(config)))


def test_an_architecture_without_it_is_refused(tmp_path):
    shape = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "state_size": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    config = from_dict(values_of(tmp_path, {"model": str(tmp_path / "model"), "attn_implementation": "sdpa"}))
    with pytest.raises(ConfigError, match=r"^agents\.ann\.attn_implementation: Mamba.* does not support") as error:
        refuse_models(config)
    assert str(error.value).endswith("; choose another one, or leave it out") and "\n" not in str(error.value)


def test_flash_attention_wants_half_precision_and_a_device(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("maporl.config.agents.fault", lambda name: None)
    flash = {"model": str(folder), "attn_implementation": "flash_attention_2"}
    with pytest.raises(ConfigError, match="flash_attention_2 computes no gradients on a CPU"):
        refuse_models(from_dict(values_of(tmp_path, flash)))
    monkeypatch.setattr(memory, "training_on_cpu", lambda config: False)
    with pytest.raises(ConfigError, match=r"these weights are in float32; set agents\.ann\.dtype: bfloat16, or choose"):
        refuse_models(from_dict(values_of(tmp_path, flash)))
    monkeypatch.setattr("maporl.team.model_checks._architecture", lambda *arguments: ())
    refuse_models(from_dict(values_of(tmp_path, flash | {"dtype": "bfloat16"})))
    refuse_models(from_dict(values_of(tmp_path, flash, training={"bf16": True})))


def test_an_installed_package_without_its_device_is_no_reason_to_fetch_kernels(folder, monkeypatch):
    """transformers would load kernels from the hub, if the package ``kernels`` is there."""
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    message = r"flash_attention_2 needs a CUDA device and flash-attn 2\.3\.3"
    with pytest.raises(WeightsError, match=message):
        read_model(AutoModelForCausalLM, folder, attn_implementation="flash_attention_2")
    with pytest.raises(WeightsError, match=message):
        read_model(AutoModelForCausalLM, in_config(folder, "flash_attention_2"))
    own = in_config(folder, "flash_attention_2", KEYS[:1])
    chosen = read_model(AutoModelForCausalLM, own, attn_implementation="eager")
    assert kind_of(chosen) == "eager", "another choice than that of config.json"


@pytest.mark.parametrize("name", ["org/kernel", "paged|org/kernel", "kernels-community/vllm-flash-attn3:flash"])
def test_code_of_the_hub_is_refused_wherever_it_is_named(folder, name):
    with pytest.raises(WeightsError, match="code from another repository"):
        read_model(AutoModelForCausalLM, folder, attn_implementation=name)
    for kind, more in ((AutoModelForCausalLM, {"attn_implementation": "eager"}), (LlamaForCausalLM, {})):
        with pytest.raises(WeightsError, match=f"attn_implementation='{re.escape(name)}': .* is code from another"):
            read_model(kind, in_config(folder, name), **more)


KEYS = ("attn_implementation", "_attn_implementation")
"""The keys of config.json for attention. transformers 5.2 reads the second one only, and then reads no other choice."""


def in_config(folder: Path, name: str, keys: tuple[str, ...] = KEYS) -> Path:
    """``folder``, whose config.json asks for ``name``."""
    file = folder / "config.json"
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key not in KEYS}
    file.write_text(json.dumps(kept | dict.fromkeys(keys, name)))
    return folder


def test_names_need_no_library():
    """A configuration is checked before torch is imported."""
    code = "import sys, trl_ext.models.attention as a; a.check_name('sdpa'); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
