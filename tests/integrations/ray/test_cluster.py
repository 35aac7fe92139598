"""What a configuration asks of a device that it cannot do. The device is pretended, because tests run without one."""

import pytest
import torch
from tiny_runs import config_of

from maporl.errors import ConfigError
from maporl.validation import preflight


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, "training.bf16: no accelerator was found; set training.bf16: false, or training.use_cpu: true"),
        ("cuda", "training.bf16: this cuda device does not compute in bfloat16; set training.bf16: false"),
    ],
)
def test_bfloat16_where_the_device_has_none_is_refused_before_a_model_loads(kind, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "accelerator", lambda: kind and torch.device(kind))
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        preflight.training_arguments(config_of(tmp_path, bf16=True, use_cpu=False))
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_bfloat16_on_the_cpu_is_taken(tmp_path):
    assert preflight.training_arguments(config_of(tmp_path, bf16=True, use_cpu=True)).bf16
