"""The state of an optimizer as files: shards of what has one number for each weight, and everything else."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

from trl_ext.files.manifest import CheckpointError
from trl_ext.sharding import optimizer_files, shards
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.optimizer_files import load_optimizer, save_optimizer
from trl_ext.sharding.shards import Shard, Shards, save_shards


def holder_of(kind=torch.optim.AdamW, **options):
    """A holder of a float32 matrix and a bfloat16 vector, after a step with gradients of 1."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    model.bias.data = model.bias.data.to(torch.bfloat16)
    holder = Holder({"policy": model}, None, list(model.parameters()))
    groups = [{"params": list(model.parameters()), "lr": 0.125}]
    holder.attach(holder.optimizer_of(groups, lambda groups: kind(groups, **options)))
    return holder


def step(holder):
    for parameter in holder.root.parameters():
        parameter.grad = torch.ones_like(parameter)
    return holder.step(float("inf"))


def test_moments_and_masters_are_shards_and_counts_are_not(tmp_path):
    holder = holder_of(weight_decay=0.0)
    step(holder)
    save_optimizer(holder, tmp_path, more=7)
    found = load_file(tmp_path / "optimizer/shards/process-0-0.safetensors")
    assert {name: value.tolist() for name, value in found.items() if "exp_avg_sq" not in name} == {
        "1/weight@0": [0.875] * 2,
        "0/exp_avg@0": pytest.approx([0.1] * 6),
        "1/exp_avg@0": pytest.approx([0.1] * 2),
    }
    rest = load_file(tmp_path / "optimizer/optimizer.safetensors")
    assert {name: value.item() for name, value in rest.items()} == {"0.step": 1.0, "1.step": 1.0}
    record = json.loads((tmp_path / "optimizer/optimizer.json").read_text())
    assert record["numbers"] == {} and record["more"] == 7
    assert [(group["params"], group["lr"]) for group in record["groups"]] == [([0, 1], 0.125)]


@pytest.mark.parametrize("kind, options", [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
def test_a_loaded_optimizer_goes_on_to_the_bit(tmp_path, kind, options):
    """SGD's state has no counts of steps: nothing of it is left out of the shards."""
    first, second = holder_of(kind, **options), holder_of(kind, **options)
    step(first)
    save_optimizer(first, tmp_path)
    with torch.no_grad():  # the weights are loaded before
        for here, there in zip(second.root.parameters(), first.root.parameters(), strict=True):
            here.copy_(there)
    assert load_optimizer(second, tmp_path)["groups"][0]["lr"] == 0.125
    for holder in (first, second):
        step(holder)
    ends = [list(holder.shards()) for holder in (first, second)]
    assert len(ends[0]) == len(ends[1]) > 3
    for one, other in zip(*ends, strict=True):
        assert (one.name, one.part) == (other.name, other.part) and torch.equal(one.values, other.values)


def test_an_optimizer_that_never_stepped_goes_on_from_its_weights(tmp_path):
    save_optimizer(holder_of(), tmp_path)
    holder = holder_of()
    load_optimizer(holder, tmp_path)
    assert not holder.optimizer.state and step(holder) == pytest.approx(8**0.5)


def test_a_large_optimizer_state_is_saved_part_by_part(tmp_path, monkeypatch):
    """At 8 billion parameters the state is 96 GB, and one process writes it."""
    monkeypatch.setattr(shards, "LARGEST", 2000)
    alive, most = set(), []

    def parts():
        for index in range(9):
            tensor = torch.full((250,), float(index))  # 1000 bytes
            alive.add(index)
            weakref.finalize(tensor, alive.discard, index)
            yield Shard(str(index), "exp_avg", 0, tensor)
            del tensor
            most.append(len(alive))

    save_shards(tmp_path, parts())
    assert max(most) <= 2
    assert len(list((tmp_path / "shards").iterdir())) == 5
    saved = Shards(tmp_path / "shards")
    assert all(saved.whole(str(n), "exp_avg", (250,)).tolist() == [float(n)] * 250 for n in range(9))
    with pytest.raises(CheckpointError, match="process 0 does not see the checkpoint"):
        save_shards(tmp_path / "elsewhere", [Shard("a", "exp_avg", 0, torch.ones(1))])


def test_what_is_no_shard_is_saved_part_by_part_too_and_a_lost_part_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer_files, "LARGEST", 1)
    holder = holder_of()
    step(holder)
    save_optimizer(holder, tmp_path)
    assert len(list((tmp_path / "optimizer").glob("optimizer*.safetensors"))) == 2
    load_optimizer(holder_of(), tmp_path)
    (tmp_path / "optimizer/optimizer.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"optimizer\.safetensors"):
        load_optimizer(holder_of(), tmp_path)
