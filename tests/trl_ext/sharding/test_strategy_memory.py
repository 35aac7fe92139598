"""The bytes that one of two processes keeps for each parameter of a bfloat16 policy, by strategy (docs/scaling.md)."""

import pytest
import torch
from launches import STRATEGIES, memory_of, skip_unless_here

from trl_ext.sharding.spreading import place, spread

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
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_a_strategy_keeps_for_each_parameter(tmp_path, name):
    skip_unless_here(name)
    weights, reference, moments, gradients = KEPT[name]
    always = weights + reference + (gradients if name in ALL_FROM_THE_START else 0)
    more = 0 if name in ALL_FROM_THE_START else gradients
    for rank, found in enumerate(memory_of(tmp_path, name)):
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
