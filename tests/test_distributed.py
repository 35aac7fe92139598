"""Two processes, started as users start them, train what one process trains: replicated, under DeepSpeed ZeRO, and sharded."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trl_ext import world

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "tests/distributed_worker.py"
ARGS = {
    "gradient_accumulation_steps": 1, "total_episodes": 24, "response_length": 4, "learning_rate": 1e-3,
    "value_learning_rate": 1e-3, "adam_epsilon": 1e-5, "temperature": 1.0, "num_ppo_epochs": 2, "report_to": [], "save_strategy": "steps",
    "save_steps": 2, "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant", "eval_questions": 7, "seed": 5,
}  # fmt: skip
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
STRATEGIES = {
    "Replicated": {},
    "Zero-2": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "Zero-3": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "Sharded": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(folder, processes, environment=(), limit=300, **options):
    """Run the worker in ``processes`` processes on a batch of 8 dialogues in all; returns the finished process."""
    folder.mkdir(parents=True, exist_ok=True)
    args = ARGS | {"output_dir": str(folder / "run"), "per_device_train_batch_size": 8 // processes, **options.pop("args", {})}
    (folder / "options.json").write_text(json.dumps({"args": args, **options}))
    command = [sys.executable, str(WORKER)]
    if processes > 1:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes),
            "--master_port", str(free_port()), str(WORKER),
        ]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), **dict(environment)}
    return subprocess.run(
        [*command, str(folder / "options.json"), str(folder)], env=variables, capture_output=True, text=True, timeout=limit
    )  # fmt: skip


def trained(folder, processes, environment=(), **options):
    done = launch(folder, processes, environment, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert [(folder / f"rank{n}").read_text() for n in range(processes)] == [str(processes)] * processes
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return load_file(folder / "weights.safetensors"), records


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(weights, metrics) of one process."""
    return trained(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_processes_end_with_the_weights_of_one(alone, tmp_path, name):
    if name.startswith("Zero"):
        pytest.importorskip("deepspeed")
    weights, records = trained(tmp_path, 2, STRATEGIES[name], strategy=name.split("-")[0])
    expected, expected_records = alone
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
    for key in ("ann/policy/approxkl_avg", "bob/loss/value_avg", "ann/objective/scores", "eval_accuracy/turn_2", "ann/grad_norm"):
        own, one = ([r[key] for r in some if key in r] for some in (records, expected_records))
        assert own and own == pytest.approx(one, abs=2e-5), key
    dialogues = (tmp_path / "run/dialogues.jsonl").read_text().splitlines()
    assert len(dialogues) == 12 and {json.loads(line)["step"] for line in dialogues} == {1, 2, 3}
    final = sorted(p.name for p in (tmp_path / "final/ann").iterdir())
    assert "model.safetensors" in final and "value_head.safetensors" in final


def test_weights_have_moved(alone, tmp_path):
    """What the tests above compare with: three updates that changed every matrix."""
    untrained, _ = trained(tmp_path, 1, args={"learning_rate": 0.0, "value_learning_rate": 0.0})
    for key, value in alone[0].items():
        if value.dim() == 2:
            assert (value - untrained[key]).abs().max() > 1e-4, key
