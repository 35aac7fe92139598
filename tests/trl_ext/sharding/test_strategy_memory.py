"""The bytes that one of two processes keeps for each parameter of a bfloat16 policy, by strategy (docs/scaling.md)."""

import json
import os

import processes
import pytest
import torch
from folders import ROOT, SUPPORT
from launches import SMALL, STRATEGIES, ZERO_3, free_port

from trl_ext.sharding.fsdp import FSDP_TORCH
from trl_ext.sharding.spreading import place, spread

WORKER = SUPPORT / "memory_worker.py"
KEPT = {
    # weights and master weights; reference; moments; gradients
    "Holder": (2 + 4, 2, 8, 4),
    "Zero-2": (2 + 4 / 2, 2, 8 / 2, 4 / 2),
    "Zero-3": (2 / 2 + 4 / 2, 2 / 2, 8 / 2, 4 / 2),
    "Sharded": (4 / 2, 2 / 2, 8 / 2, 4 / 2),
}
ALL_FROM_THE_START = ("Zero-3",)
"""DeepSpeed reserves the gradients of ZeRO-3 at the start, and keeps them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Sharded", *(pytest.param(n, marks=pytest.mark.slow) for n in STRATEGIES if n != "Sharded")]
)
def test_what_a_strategy_keeps_for_each_parameter(tmp_path, name):
    if name == "Sharded" and torch.__version__ < FSDP_TORCH:
        pytest.skip(f"FSDP2 needs torch {FSDP_TORCH}")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    variables |= STRATEGIES[name]
    if name.startswith("Zero"):
        pytest.importorskip("deepspeed")
        zero = {"stage": int(name[-1]), **SMALL} | (
            {f"stage3_{k}": v for k, v in ZERO_3.items()} if name == "Zero-3" else {}
        )
        (tmp_path / "deepspeed.json").write_text(
            json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
        )
        variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(tmp_path / "deepspeed.json")
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        processes.start([WORKER, tmp_path], variables | world | {"RANK": str(n), "LOCAL_RANK": str(n)}) for n in (0, 1)
    ]
    done = processes.end_of(ranks, 300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    weights, reference, moments, gradients = KEPT[name]
    always = weights + reference + (gradients if name in ALL_FROM_THE_START else 0)
    more = 0 if name in ALL_FROM_THE_START else gradients
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["strategy"] == name.split("-")[0]
        close = {"abs": 0.35}  # the critic's head, rows, and DeepSpeed's bucket
        assert found["weights"] == pytest.approx(always, **close)
        assert found["read"] == pytest.approx(always, **close), "what a forward gathers is given back"
        assert found["micro-batches"] == pytest.approx([always + more] * 2, **close)
        assert found["stepped"] == pytest.approx(always + moments, **close)
        assert found["policy"] == found["reference"] == found["reference after"] == 0.0, "all have the main's weights"
        assert found["moved"] > 0 and found["whole reference"] and found["loaded"]
        whole = int(rank == 0 and name == "Holder")
        assert found["reads"] == whole, "only the main process reads a whole model, and shards are read by all"


def test_a_model_without_weights_in_the_only_process_is_an_error():
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(RuntimeError, match="on the meta device in the main process"):
        place(model, torch.device("cpu"))


def test_shared_weights_that_are_received_are_still_shared():
    one = torch.nn.Linear(2, 2, bias=False)
    both = torch.nn.ModuleList([one, torch.nn.Linear(2, 2, bias=False)])
    both[1].weight = one.weight
    before = one.weight.detach().clone()
    spread(both.modules(), torch.device("cpu"), {id(one.weight)})
    assert both[0].weight is both[1].weight and torch.equal(both[0].weight, before)
