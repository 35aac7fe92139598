"""Liger's kernels. They need an accelerator, so that a package in its place changes here what Liger changes, where it
does. ``benchmarks/gpu_acceptance.py --only liger`` compares the real ones with transformers."""

import sys
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from tiny_models import build_any
from tiny_runs import config_of
from transformers.integrations import liger as integration
from transformers.models.qwen3 import modeling_qwen3

from maporl.errors import ConfigError
from maporl.validation.preflight import training_arguments
from trl_ext import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.models import liger
from trl_ext.models.liger import use_liger

OPTIONS = {"report_to": [], "per_device_train_batch_size": 2, "temperature": 1.0}


@pytest.fixture
def package(monkeypatch):
    """A package that replaces a function and a class of the module, and the forwards of a model's norms."""
    calls = SimpleNamespace(applied=[], rotated=[], norms=0)

    def rotate(q, k, cos, sin, *arguments):
        calls.rotated.append(q.device.type)
        return q, k

    def norm(self, hidden):
        calls.norms += 1
        return type(self).forward(self, hidden)

    def apply(model=None, rope=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True):
        calls.applied.append((model, rope, rms_norm, cross_entropy, fused_linear_cross_entropy))
        if rope:
            modeling_qwen3.apply_rotary_pos_emb = rotate
        modeling_qwen3.Qwen3RMSNorm = type("LigerRMSNorm", (torch.nn.Module,), {})
        if rms_norm:
            model.model.norm.forward = MethodType(norm, model.model.norm)

    def apply_to_instance(model, **options):
        patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model, **options)

    package, transformers, patch = (ModuleType(name) for name in ("liger_kernel", "transformers", "monkey_patch"))
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply}
    transformers.monkey_patch, transformers._apply_liger_kernel_to_instance = patch, apply_to_instance
    package.transformers = transformers
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patch)
    monkeypatch.setattr(integration, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    monkeypatch.setattr(liger, "version", lambda name: "0.8.5")
    for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm"):
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))
    calls.rotate = rotate
    return calls


def test_a_model_computes_by_the_kernels_and_others_as_before(tiny, package):
    plain, rotary = modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.apply_rotary_pos_emb
    model, other = build_any(tiny, "qwen3")[0], build_any(tiny, "qwen3")[0]
    ids = torch.tensor([[3, 4, 5]])
    expected = other(input_ids=ids).logits
    use_liger(model, {"rope": True})
    assert package.applied == [(model, True, True, False, False)], "the losses are left out"
    assert modeling_qwen3.Qwen3RMSNorm is plain, "models that are built later are those of transformers"
    assert torch.equal(other(input_ids=ids).logits, expected) and package.norms == 0
    assert torch.equal(model(input_ids=ids).logits, expected) and package.norms == 1
    function = modeling_qwen3.apply_rotary_pos_emb
    assert package.rotated == [] and (function.kernel, function.plain) == (package.rotate, rotary)
    assert function(torch.ones(1, device="meta"), 2, 3, 4)[1] == 2 and package.rotated == ["meta"]
    use_liger(other, None)
    assert modeling_qwen3.apply_rotary_pos_emb is function, "it is not wrapped twice"


def test_an_architecture_without_kernels_is_refused(tiny, package):
    with pytest.raises(ValueError, match=r"Liger 0\.8\.5 has no kernels for 'olmo2'.*one of: qwen3"):
        use_liger(build_any(tiny, "olmo2")[0], None)


def test_a_policy_its_critic_and_its_reference_use_the_kernels(tiny, package, tmp_path, monkeypatch):
    monkeypatch.setattr(liger, "accelerator", lambda: torch.device("meta"))
    args = PPOv2Config(output_dir=str(tmp_path), use_liger_kernel=True, liger_kernel_config={"rope": False}, **OPTIONS)
    (model, tokenizer), value, reference = (build_any(tiny, "qwen3", dtype=torch.float32) for _ in range(3))
    policy = Learner(
        Policy("policy", model, tokenizer), args, critic="model", value_model=value[0], reference=reference[0]
    )
    policy.prepare(Accelerator(cpu=True), 1)
    assert [(found, rope) for found, rope, *_ in package.applied] == [
        (policy.model, False), (policy.critic.model, False), (policy.reference, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), [
    ({"use_liger_kernel": True, "use_cpu": True}, "its kernels run on accelerators only; leave it out on a CPU"),
    ({"use_liger_kernel": True}, "its kernels run on accelerators only"),  # no accelerator is here
    ({"liger_kernel_config": {"rope": False}}, "would do nothing without use_liger_kernel; set it, or leave both"),
    (
        {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True, "rope": True}},
        "liger_kernel_config: cross_entropy would do nothing",
    ),
    ({"use_liger_kernel": True, "liger_kernel_config": "[1]"}, "expected names of kernels with true or false"),
])  # fmt: skip
def test_what_would_do_nothing_is_refused_before_models_load(tmp_path, package, options, message):
    with pytest.raises(ValueError, match=message):
        PPOv2Config(output_dir=str(tmp_path), **OPTIONS, **options)


def test_a_configuration_asks_for_the_kernels(tmp_path, package, monkeypatch):
    config = config_of(tmp_path / "run", use_liger_kernel=True, use_cpu=False)
    with pytest.raises(ConfigError, match=r"^training: use_liger_kernel: its kernels run on accelerators only"):
        training_arguments(config)
    monkeypatch.setattr(liger, "accelerator", lambda: torch.device("meta"))
    assert training_arguments(config).use_liger_kernel
    assert not training_arguments(config_of(tmp_path / "run")).use_liger_kernel


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="liger-kernel is not installed; pip install liger-kernel"):
        PPOv2Config(output_dir=str(tmp_path), use_liger_kernel=True, **OPTIONS)
