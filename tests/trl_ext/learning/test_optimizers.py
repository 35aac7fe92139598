"""``training.optim`` and quantised bases: what steps, what a checkpoint keeps, and what is refused."""

import importlib.util
import json

import pytest
import torch
from one_policy import StopAfter, config, same, trainer_of
from safetensors.torch import load_file

from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.validation.load import from_dict
from maporl.validation.preflight import training_arguments
from trl_ext.sharding.choice import build_optimizer
from trl_ext.sharding.fsdp import Sharded
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.zero import Zero

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
with_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes: pip install -e '.[dev]'")


def run(tiny, folder, stop_at=None, resume=None):
    options = {"total_episodes": 64, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_bnb_8bit"}
    trainer = trainer_of(tiny, folder, **options)
    trainer.add_callback(StopAfter(stop_at))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.learners["policy"].model.state_dict()


def test_an_optimizer_is_the_one_that_is_named_with_its_options(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    args = config(tmp_path, optim="adamw_torch", adam_beta2=0.9, weight_decay=0.25)
    made = build_optimizer([{"params": [weight], "lr": 0.5}], args, Holder)
    assert type(made) is torch.optim.AdamW
    assert {k: made.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay", "fused")} == {
        "lr": 0.5, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.25, "fused": None,
    }  # fmt: skip
    args = config(tmp_path)
    usual = build_optimizer([{"params": [weight], "lr": 0.5}], args, Holder)
    fused = args.optim == "adamw_torch_fused"  # transformers' own choice, from torch 2.8 on
    assert usual.param_groups[0]["fused"] is (True if fused else None)
    weight.grad = torch.full((3,), 2.0)
    made.step()  # 1 - 0.5 * 0.25 * 1 - 0.5 * sign(gradient): Adam's first step is one learning rate
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.375))


@with_bitsandbytes
def test_eight_bit_moments_train_and_resume_bit_identically(tiny, tmp_path):
    whole = run(tiny, tmp_path / "whole")
    run(tiny, tmp_path / "parts", stop_at=3)  # its last checkpoint is of update 2
    assert same(whole, run(tiny, tmp_path / "parts", resume=True))
    assert not same(whole, tiny()[0].state_dict()), "it learned"
    kept = load_file(next((tmp_path / "whole/checkpoint-2").rglob("optimizer.safetensors")))
    moments = [value for name, value in kept.items() if name.endswith(("/state1", "/state2"))]
    large = [value for value in moments if value.numel() >= 4096]  # bitsandbytes keeps smaller ones whole
    assert large and all(value.dtype == torch.uint8 for value in large)
    record = json.loads(next((tmp_path / "whole/checkpoint-2").rglob("optimizer.json")).read_text())
    assert record["numbers"]["0.step"] == 8, "two updates of four passes"


@pytest.mark.parametrize("kind", [Zero, Sharded])
def test_states_that_cannot_be_cut_are_refused(tmp_path, kind):
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5}]
    with pytest.raises(ValueError, match="optim: 'adamw_bnb_8bit' has a state that"):
        build_optimizer(groups, config(tmp_path, optim="adamw_bnb_8bit"), kind)


def settings(optim):
    return {
        "output_dir": "unused", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}, "evaluation": {"questions": 0},
        "training": {"optim": optim},
    }  # fmt: skip


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("maporl.validation.preflight.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"adamw_bnb_8bit needs the package bitsandbytes.*pip install.*\[quantized\]"):
        training_arguments(from_dict(settings("adamw_bnb_8bit")))


def test_the_estimate_of_memory_knows_eight_bit_moments():
    from maporl.team.memory import estimate

    whole, small = (
        estimate(ResolvedRun(from_dict(settings(o))), 20, 1)["optimizer"] for o in ("adamw_torch", "adamw_bnb_8bit")
    )
    assert small == pytest.approx(whole * (1 + 4 / 256) / 4)


# -- quantised bases ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@with_bitsandbytes
@pytest.mark.parametrize("bits", [pytest.param("load_in_4bit", marks=pytest.mark.slow), "load_in_8bit"])
def test_adapters_train_on_a_quantised_base_that_stays_as_it_is(tiny, tmp_path, bits):
    from maporl.runs import train as runs
    from maporl.team.team import Team

    model, tokenizer = tiny(alphabet="0123456789+=;", hidden_size=384, layers=1)  # kernels want multiples of 32
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    agent = {"model": str(tmp_path / "base"), "lora": {"r": 4}, bits: True}
    config = from_dict(
        {
            "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum", "largest": 9}, "agents": {"ann": agent, "bob": agent},
            "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}", "separator": ";"},
            "updates": 2, "ppo": {"response_length": 4}, "evaluation": {"questions": 4}, "reward": {"sources": {"near": 1.0}},
            "training": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-2},
        }
    )  # fmt: skip
    runs.train(config, resume=False, quiet=True)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(r["ann/val/first_ratio"] == pytest.approx(1.0, abs=1e-3) for r in records if "ann/val/first_ratio" in r)
    team = Team.from_pretrained(tmp_path / "run")
    shared = team.policies["ann"].model
    assert shared is team.policies["bob"].model and shared.get_base_model().is_quantized
    kinds = {type(module).__name__ for module in shared.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"} == {"Linear4bit" if bits == "load_in_4bit" else "Linear8bitLt"}
    for name in ("ann", "bob"):
        learned = load_file(tmp_path / f"run/final/{name}/adapter_model.safetensors")
        assert max(float(v.abs().max()) for k, v in learned.items() if "lora_B" in k) > 1e-3
