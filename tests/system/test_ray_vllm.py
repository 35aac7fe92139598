"""A vLLM in each process that samples for a group, with a real vLLM and a real Ray: weights arrive, and deaths are
survived.

``make test-vllm`` runs these tests where vLLM and Ray are installed beside maporl. On CPUs vLLM has no sleep mode, so
that nothing here sleeps.
"""

import importlib.util

import pytest
import torch
from killed_at import killed_after
from safetensors.torch import load_file
from vllm_engines import EXACT, HERE, saved, small_cache  # noqa: F401  # fixtures

from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "ray")), reason="needs vLLM and Ray here"
    ),
]
COLOCATE = {"gpu_memory_utilization": 0.2, "max_model_len": 128, "options": HERE.options}
SECTION = {
    "engine": "vllm",
    "vllm": {"colocate": COLOCATE, "seeds": False},
}  # vLLM crashes on CPUs if requests have seeds


def config_of(folder, agents, updates, **cluster):
    return from_dict(
        {
            "output_dir": str(folder),
            "task": {"name": "toy_sum", "largest": 9},
            "protocol": {"name": "debate", "turns": 2, "later": "{others}={question}", "quote": "{text}"},
            "agents": agents,
            "updates": updates,
            "ppo": {"response_length": 8, "temperature": 0.8, "engine_tis_cap": 2.0},
            "training": {
                "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 3e-3,
            },
            "evaluation": {"questions": 8},
            "cluster": {"backend": "ray", "batching": "flow", **cluster},
        }
    )  # fmt: skip


def test_whole_weights_and_adapters_reach_the_vllms_of_their_groups(saved, tmp_path):
    """Two policies with weights of their own, and two adapters on one base. An engine dies after the second update.

    The log-probabilities that vLLM gives are those of the weights that are trained, update after update.
    """
    for seed in (0, 1, 2):
        saved(seed)
    agents = {
        "ann": {"model": str(tmp_path / "base-0-False"), **SECTION},
        "cat": {"model": str(tmp_path / "base-2-False"), "lora": {"r": 4, "alpha": 8}, **SECTION},
        "dan": {"model": str(tmp_path / "base-2-False"), "lora": {"r": 4, "alpha": 8}, **SECTION},
    }
    trainer = build_trainer(config_of(tmp_path / "run", agents, 5), quiet=True)
    pool = trainer.home.pools["ann"]
    before = load_file(tmp_path / "base-0-False" / "model.safetensors")
    try:
        with killed_after(trainer, 2, next(iter(pool._members)).pid()):
            trainer.train()
    finally:
        trainer.home.end()
    assert pool.replaced == 1
    records = trainer.run.read_metrics()
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for name in agents:
        assert all(record[f"{name}/policy/engine_gap"] < EXACT for record in records), name
    after = load_file(tmp_path / "run/final/ann/model.safetensors")
    assert max(float((after[key] - value).abs().max()) for key, value in before.items() if key in after) > 1e-3
    assert all(torch.isfinite(value).all() for value in after.values())
