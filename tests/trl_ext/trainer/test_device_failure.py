"""A device that fails or is full in the middle of a run.

No device is here: its error is raised where a device would raise it.
"""

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import config_of
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.parse import to_yaml
from trl_ext.learning import checkpoint
from trl_ext.learning.learners import Learning
from trl_ext.trainer.loop import DeviceFailure, device_failure

FAILURE = getattr(torch, "AcceleratorError", RuntimeError)
"""What a kernel that fails raises; torch before 2.8 has no type for it."""
LOST = (
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported at some other API call"
)


def train(tmp_path, *words):
    path = tmp_path / "team.yaml"
    path.write_text(to_yaml(config_of(tmp_path / "run", 3, {"warm_start": {"steps": 0}})))
    return CliRunner().invoke(app, ["train", str(path), *words])


def error_of(done):
    assert done.exit_code == 1, done.output
    return [line for line in done.output.splitlines() if line.startswith("error: ")]


def weights(folder):
    return load_file(folder / "final/ann/model.safetensors")


@pytest.mark.slow
def test_a_device_that_disappears_in_an_update_leaves_a_whole_checkpoint_to_resume_from(tmp_path, monkeypatch):
    lost, whole = f"output_dir={tmp_path / 'lost'}", f"output_dir={tmp_path / 'whole'}"
    real = Learning.update

    def update(self, batches, number):
        metrics = real(self, batches, number)  # the weights in memory have moved when the device fails
        if number == 2:
            raise FAILURE(LOST)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(Learning, "update", update)
        [line] = error_of(train(tmp_path, "--set", lost))
    newest = tmp_path / "lost/checkpoint-2"
    assert (
        "the device failed after 2 complete updates (CUDA error: unspecified launch failure); its newest checkpoint "
        f"is {newest}" in line
    )
    assert "--resume" in line and "asynchronously" not in line
    assert train(tmp_path, "--set", lost, "--resume").exit_code == 0
    assert train(tmp_path, "--set", whole).exit_code == 0
    resumed, expected = weights(tmp_path / "lost"), weights(tmp_path / "whole")
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_a_device_that_disappears_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    real, written = checkpoint.write_manifest, []

    def write_manifest(folder, *rest):
        if len(written) == 1:
            raise FAILURE(LOST)
        written.append(folder)
        return real(folder, *rest)

    output = f"output_dir={tmp_path / 'run'}"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", write_manifest)
        [line] = error_of(train(tmp_path, "--set", output))
    assert f"its newest checkpoint is {tmp_path / 'run/checkpoint-1'};" in line
    assert not (tmp_path / "run/checkpoint-2").exists()
    done = train(tmp_path, "--set", output, "--resume")
    assert done.exit_code == 0 and (tmp_path / "run/checkpoint-3").is_dir(), done.output


@pytest.mark.parametrize("text", ["HIP error: device lost", "XPU error: -999"])
def test_every_kind_of_device_is_known(tmp_path, text):
    assert "it has no checkpoint; set save_steps" in str(device_failure(RuntimeError(text), tmp_path, 0))


def test_a_full_device_names_the_settings_that_need_less(tmp_path):
    failure = device_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."), tmp_path, 3)
    assert isinstance(failure, DeviceFailure) and failure.exit_status == 1
    assert "Tried to allocate 20 GiB.; set a lower max_tokens_per_microbatch" in str(failure)


@pytest.mark.parametrize("error", [RuntimeError("no CUDA error"), ValueError("CUDA error: x"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(tmp_path, error):
    assert device_failure(error, tmp_path, 1) is None
