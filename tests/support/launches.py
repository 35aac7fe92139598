"""Processes that train together: their worker, the strategies, and how they are started."""

import json
import os
import socket
import subprocess
import sys

import processes
import pytest
import torch
from folders import ROOT, SUPPORT
from safetensors.torch import load_file

from trl_ext.sharding.fsdp import FSDP_TORCH

WORKER = SUPPORT / "distributed_worker.py"
ARGS = {
    "gradient_accumulation_steps": 1, "total_episodes": 24, "response_length": 4, "learning_rate": 1e-3,
    "value_learning_rate": 1e-3, "adam_epsilon": 1e-5, "temperature": 1.0, "num_ppo_epochs": 2, "report_to": [], "save_strategy": "steps",
    "save_steps": 2, "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant", "eval_questions": 7, "seed": 5,
}  # fmt: skip
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"}
STRATEGIES = {
    "Holder": {},
    "Zero-2": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "Zero-3": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "Sharded": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks_of(words, number, environment=()):
    """Start ``python WORDS`` in processes that train together, with the variables that a launcher sets."""
    world = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **dict(environment), **world}
    return [processes.start(words, variables | {"RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(number)]


def launch(folder, number, environment=(), limit=300, torchrun=False, **options):
    """Run the worker in ``number`` processes on a batch of 8 dialogues in all; returns what ended, or the first that
    failed.

    ``torchrun`` starts them as users do. Otherwise they are forks with the variables that it sets, which begin seconds
    earlier.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 8 // number}
    args = ARGS | own | options.pop("args", {})
    (folder / "options.json").write_text(json.dumps({"args": args, **options}))
    worker = [str(WORKER), str(folder / "options.json"), str(folder)]
    alone = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    variables = {**os.environ, **alone, **dict(environment)}
    if torchrun:
        launcher = ["torch.distributed.run", "--nproc_per_node", str(number), "--master_port", str(free_port())]
        command = [sys.executable, "-m", *launcher, *worker]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit)
    return together(worker, variables, number, limit)


def together(words, variables, number=2, limit=300):
    """Run ``python WORDS`` in ``number`` processes that know of each other; returns what ended, or the first that
    failed."""
    if number == 1:
        return processes.run(words, variables, timeout=limit)
    ranks = ranks_of(words, number, variables)
    return processes.end_of(ranks, limit)


def trained(folder, number, environment=(), **options):
    done = launch(folder, number, environment, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert [(folder / f"rank{n}").read_text() for n in range(number)] == [str(number)] * number
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return load_file(folder / "weights.safetensors"), records


def skip_unless_here(name):
    if name.startswith("Zero"):
        pytest.importorskip("deepspeed")
    if name == "Sharded" and torch.__version__ < FSDP_TORCH:
        pytest.skip(f"FSDP2 needs torch {FSDP_TORCH}")


SMALL = {"reduce_bucket_size": 50_000}
"""DeepSpeed's default buffers, of a fixed size, are larger than the model of this test. Nothing stays gathered."""
ZERO_3 = dict.fromkeys(
    ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"), 0
)


def memory_of(folder, strategy, number=2):
    """What each process of ``memory_worker.py`` found in ``folder`` under a strategy."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    variables |= STRATEGIES[strategy]
    if strategy.startswith("Zero"):
        zero = {"stage": int(strategy[-1]), **SMALL}
        zero |= {f"stage3_{key}": value for key, value in ZERO_3.items() if strategy == "Zero-3"}
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        (folder / "deepspeed.json").write_text(json.dumps(settings))
        variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder / "deepspeed.json")
    done = together([SUPPORT / "memory_worker.py", folder], variables, number)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(number)]
