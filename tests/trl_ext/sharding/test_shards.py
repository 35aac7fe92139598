"""Checkpoints in shards (trl_ext/sharding/shards.py): written by any number of processes, in the background, and read
by any."""

import shutil

import pytest
import torch
from half_precision import learner_of, take_steps, trained
from processes import maporl
from safetensors.torch import save_file
from tiny_runs import config_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from maporl.integrations.exporting.plain import export
from maporl.runs.build import build_trainer
from maporl.runs.evaluate import evaluate
from maporl.storage.run_folder import RunExists
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.checkpoint import CheckpointWriter, Learners, load_checkpoint
from trl_ext.sharding.shards import Shard, Shards, ShardWriter, load_model


def test_ranges_of_several_processes_are_read_as_one(tmp_path):
    numbers = torch.arange(10.0)
    writer = ShardWriter()
    writer.add(tmp_path, [Shard("a", "weight", at, numbers[at:end]) for at, end in ((0, 4), (7, 10), (4, 7))])
    writer.write()
    shards = Shards(tmp_path / "shards")
    for start in range(10):
        for end in range(start, 11):
            assert shards.read("a", "weight", start, end).tolist() == numbers[start:end].tolist()
    assert shards.whole("a", "weight", (2, 5)).tolist() == numbers.view(2, 5).tolist()
    with pytest.raises(CheckpointError, match=r"holds numbers 0 to 10 of 'a' \(weight\), expected 0 to 12"):
        shards.whole("a", "weight", (3, 4))
    with pytest.raises(CheckpointError, match="has 10 numbers, expected 9"):
        shards.whole("a", "weight", (3, 3))
    with pytest.raises(CheckpointError, match="'b'"):
        shards.read("b", "weight", 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("critic", ["head", "model"])
def test_a_checkpoint_is_of_the_moment_in_which_it_was_begun(tmp_path, dtype, critic):
    """Training goes on while it is written, and a run that resumes from it ends with the same weights to the bit."""
    learner = learner_of(dtype, critic, tmp_path, async_save=True)
    take_steps(learner, 2)
    saving = CheckpointWriter(tmp_path / "checkpoint-1", Learners(policy=learner), {})
    take_steps(learner, 2)
    saving.finish()
    resumed = learner_of(dtype, critic, tmp_path, async_save=True)
    load_checkpoint(tmp_path / "checkpoint-1", Learners(policy=resumed))
    take_steps(resumed, 2)
    ends = trained(learner), trained(resumed)
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of three updates that saves after each in the background, and what its callbacks saw when they were
    told."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = config_of(folder, 3, {"evaluation": {"questions": 16}, "warm_start": {"steps": 0}}, async_save=True)
    trainer = build_trainer(config, quiet=True)
    told = []

    class Told(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            told.append([path.name for path in list_checkpoints(folder)])

    trainer.add_callback(Told())
    trainer.train()
    assert told[-1][-1] == "checkpoint-3" and len(told) == 3
    return folder


def test_a_checkpoint_in_shards_plays_as_the_final_policies_do(run_folder):
    config = config_of(run_folder, 3, {"evaluation": {"questions": 16}, "warm_start": {"steps": 0}})
    shards, final = (evaluate(config, run_folder / name) for name in ("checkpoint-3", "final"))
    assert shards.metrics() == final.metrics()


def test_exported_policies_are_the_final_ones(run_folder, tmp_path):
    done = maporl("export", run_folder / "checkpoint-3", tmp_path / "plain")
    assert done.returncode == 0 and done.stdout.split() == [str(tmp_path / "plain/ann"), str(tmp_path / "plain/bob")]
    for name in ("ann", "bob"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / name)
        final = AutoModelForCausalLM.from_pretrained(run_folder / "final" / name)
        assert exported.dtype == final.dtype and exported.state_dict().keys() == final.state_dict().keys()
        assert all(torch.equal(value, final.state_dict()[key]) for key, value in exported.state_dict().items())
        assert not {"shards", "optimizer", "critic"} & {path.name for path in (tmp_path / "plain" / name).iterdir()}
        AutoTokenizer.from_pretrained(tmp_path / "plain" / name)
    with pytest.raises(RunExists, match="exists already and is not empty"):
        export(run_folder / "checkpoint-3", tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"no MANIFEST\.json"):
        export(run_folder / "final", tmp_path / "other")


def test_a_shard_that_is_missing_or_damaged_is_named(run_folder, tmp_path):
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(run_folder / "checkpoint-3", copy)
    file = copy / "policies/ann/shards/process-0-0.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"process-0-0\.safetensors is missing or damaged"):
        export(copy, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"process-0-0\.safetensors: cannot be read as shards"):
        Shards(file.parent)
    file.unlink()
    save_file({"models.policy.other/weight@0": torch.zeros(3)}, file)
    model = AutoModelForCausalLM.from_pretrained(run_folder / "final/ann")
    with pytest.raises(CheckpointError, match="so it is not of this model; expected"):
        load_model(model, Shards(file.parent), "models.policy.")


def test_adapters_are_saved_as_plain_folders(run_folder, tmp_path):
    defaults = {"tiny": {"hidden_size": 32, "layers": 1}, "lora": {"r": 2}}
    sections = {"warm_start": {"steps": 0}, "agent_defaults": defaults}
    config = config_of(tmp_path / "run", 1, sections, async_save=True)
    build_trainer(config, quiet=True).train()
    own = {path.name for path in (tmp_path / "run/checkpoint-1/policies/ann").iterdir()}
    assert "adapter_model.safetensors" in own and "shards" not in own
    paths = export(tmp_path / "run/checkpoint-1", tmp_path / "plain")
    assert (paths[0] / "adapter_model.safetensors").is_file() and not (paths[0] / "optimizer").exists()
