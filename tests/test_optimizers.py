"""``training.optim``: which optimizer steps, what a checkpoint keeps of it, and what is refused."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from maporl.config import ConfigError, from_dict
from maporl.run_checks import training_arguments
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.strategies import Replicated, Sharded, Zero, build_optimizer

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
with_bitsandbytes = pytest.mark.skipif(
    not HAS_BITSANDBYTES, reason="needs bitsandbytes: pip install 'maporl[quantized]'"
)


def arguments(folder, **options):
    return PPOv2Config(
        output_dir=str(folder), per_device_train_batch_size=16, gradient_accumulation_steps=1, total_episodes=64, response_length=6,
        report_to=[], use_cpu=True, disable_tqdm=True, save_steps=2, learning_rate=1e-3, lr_scheduler_type="constant", **options,
    )  # fmt: skip


def run(tiny, folder, stop_at=None, resume=None, **options):
    model, tokenizer = tiny(alphabet="0123456789+=;")
    questions = [{"prompt": f"{a}+{b}=", "number": a} for a in range(8) for b in range(8)]
    trainer = PPOv2Trainer(
        arguments(folder, **options), tokenizer, model, train_dataset=questions,
        reward_funcs=lambda prompts, completions, **columns: [float(text.count("1")) for text in completions],
    )  # fmt: skip
    if stop_at:
        finish = trainer._finish_update

        def stopping(*values):
            finish(*values)
            trainer.control.should_training_stop = trainer.state.global_step == stop_at

        trainer._finish_update = stopping
    trainer.train(resume_from_checkpoint=resume)
    return model


def test_an_optimizer_is_the_one_that_is_named_with_its_options(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    args = arguments(tmp_path, optim="adamw_torch", adam_beta2=0.9, weight_decay=0.25)
    made = build_optimizer([{"params": [weight], "lr": 0.5}], args, Replicated)
    assert type(made) is torch.optim.AdamW
    assert {k: made.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay", "fused")} == {
        "lr": 0.5, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.25, "fused": None,
    }  # fmt: skip
    usual = build_optimizer([{"params": [weight], "lr": 0.5}], arguments(tmp_path), Replicated)
    assert usual.param_groups[0]["fused"] is True
    weight.grad = torch.full((3,), 2.0)
    made.step()  # 1 - 0.5 * 0.25 * 1 - 0.5 * sign(gradient): Adam's first step is one learning rate
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.375))


@with_bitsandbytes
def test_eight_bit_moments_train_and_resume_bit_identically(tiny, tmp_path):
    start = {name: value.clone() for name, value in tiny(alphabet="0123456789+=;")[0].state_dict().items()}
    whole = run(tiny, tmp_path / "whole", optim="adamw_bnb_8bit").state_dict()
    run(tiny, tmp_path / "parts", stop_at=3, optim="adamw_bnb_8bit")  # its last checkpoint is of update 2
    parts = run(tiny, tmp_path / "parts", resume=True, optim="adamw_bnb_8bit").state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in whole.items()), "it learned"
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
    kept = load_file(next((tmp_path / "whole/checkpoint-2").rglob("optimizer.safetensors")))
    moments = [value for name, value in kept.items() if name.endswith(("/state1", "/state2"))]
    large = [value for value in moments if value.numel() >= 4096]  # bitsandbytes keeps smaller ones whole
    assert large and all(value.dtype == torch.uint8 for value in large)
    record = json.loads(next((tmp_path / "whole/checkpoint-2").rglob("optimizer.json")).read_text())
    assert record["numbers"]["0.step"] == 8, "two updates of four passes"


@pytest.mark.parametrize("kind", [Zero, Sharded])
def test_states_that_cannot_be_cut_are_refused(tmp_path, kind):
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5}]
    with pytest.raises(ValueError, match=rf"optim: 'adamw_bnb_8bit' keeps a state that {kind.__name__} cannot cut"):
        build_optimizer(groups, arguments(tmp_path, optim="adamw_bnb_8bit"), kind)


def settings(optim):
    return {
        "output_dir": "unused", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}, "evaluation": {"questions": 0},
        "training": {"optim": optim},
    }  # fmt: skip


def test_other_names_are_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"training\.optim.*adamw_torch_fused.*adamw_bnb_8bit"):
        from_dict(settings("adam8"))


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("maporl.run_checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"adamw_bnb_8bit needs the package bitsandbytes.*maporl\[quantized\]"):
        training_arguments(from_dict(settings("adamw_bnb_8bit")))


def test_the_estimate_of_memory_knows_eight_bit_moments():
    from maporl.memory import estimate

    whole, small = (estimate(from_dict(settings(o)), 20)["optimizer"] for o in ("adamw_torch", "adamw_bnb_8bit"))
    assert small == pytest.approx(whole * (1 + 4 / 256) / 4)
