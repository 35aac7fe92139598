"""The memory estimate of ``maporl check`` against the peak of a run."""

import json
import subprocess
import sys

import pytest

from maporl.config.parse import to_yaml
from maporl.validation import memory
from maporl.validation.load import from_dict
from maporl.validation.memory import LIBRARIES, estimate
from maporl.validation.preflight import check_run

MODEL = {"alphabet": "0123456789+=;", "hidden_size": 768, "layers": 6, "heads": 12, "context": 256}


def config_of(folder, **training):
    return from_dict(
        {
            "output_dir": str(folder), "task": {"name": "toy_sum", "largest": 9}, "agents": {"ann": {"tiny": MODEL}},
            "protocol": {"name": "debate", "turns": 1, "opening": "{question} " + "0123456789" * 10}, "updates": 2,
            "ppo": {"response_length": 16, "num_ppo_epochs": 1, "temperature": 1.0, "stop_token": "none"},
            "training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True, **training},
            "evaluation": {"questions": 0},
        }
    )  # fmt: skip


OTHERS = [{"critic": "model"}, {"gradient_checkpointing": True}]


@pytest.mark.parametrize("training", [{}, *(pytest.param(t, marks=pytest.mark.slow) for t in OTHERS)])
def test_the_estimate_is_within_a_quarter_of_the_peak(tmp_path, training):
    config = config_of(tmp_path / "run", **training)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    subprocess.run([sys.executable, "-m", "maporl", "train", str(file), "-q"], check=True, capture_output=True)
    peak = [json.loads(text)["memory/peak"] for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
    told = next(text for text in check_run(config_of(tmp_path / "other", **training)) if text.startswith("memory:"))
    about = float(told.split("about ")[1].split(" ")[0])
    print(f"{training}: estimated {about}, measured {peak:.2f} GiB; {told}")
    assert about == pytest.approx(peak, rel=0.25)


def test_tiny_models_need_little_beside_the_libraries(tmp_path):
    small = {"alphabet": "01:", "hidden_size": 8, "layers": 1, "heads": 2}
    values = {
        "output_dir": str(tmp_path / "x"), "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": small}}, "training": {"use_cpu": True},
    }  # fmt: skip
    told = memory.line(from_dict(values), longest=10, dialogues=1)
    assert told == "memory: about 0.5 GiB for a process that holds everything"


def test_half_precision_weights_have_float32_copies_moments_and_sums_of_gradients(monkeypatch):
    shape = memory.Shape(1000, layers=2, hidden=8, intermediate=16, keys=8, vocabulary=100, bytes=2, matrices=())
    monkeypatch.setattr(memory, "shape_of", lambda section: shape)
    values = {
        "output_dir": "unused", "task": {"name": "toy_sum"}, "agents": {"ann": {"model": "org/model"}}, "evaluation": {"questions": 0},
    }  # fmt: skip
    parts = estimate(from_dict(values), longest=10, dialogues=1)
    assert [parts["weights"], parts["references"]] == [2 * 1000, 2 * 1000]
    assert parts["optimizer"] == 1000 * (4 + 2 * 4)
    assert parts["gradients"] == 1000 * (4 + 2), "the sums, and one micro-batch's own"
    shape.bytes = 4
    parts = estimate(from_dict(values), longest=10, dialogues=1)
    assert [parts["optimizer"], parts["gradients"]] == [1000 * 2 * 4, 1000 * 4]


def test_adapters_share_a_base_and_keep_float32_copies(monkeypatch):
    shape = memory.Shape(1000, layers=2, hidden=8, intermediate=16, keys=8, vocabulary=100, bytes=2, matrices=())
    monkeypatch.setattr(memory, "shape_of", lambda section: shape)
    agent = {"model": "org/model", "lora": {"r": 4}}
    config = from_dict(
        {
            "output_dir": "unused", "task": {"name": "toy_sum"}, "agents": {"ann": agent, "bob": agent}, "evaluation": {"questions": 0},
            "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, "ppo": {"response_length": 5},
        }
    )  # fmt: skip
    parts = estimate(config, longest=10, dialogues=1)
    adapter = 4 * 2 * (4 * 8 + 2 * 8 + 2 * 8 + 3 * (8 + 16))  # rank x layers x (in + out of q, k, v, o, gate, up, down)
    assert parts["weights"] == 2 * 1000 + 2 * 2 * adapter, "one base, two adapters"
    assert parts["references"] == 0, "the base without adapters"
    assert parts["optimizer"] == 2 * adapter * (4 + 2 * 4)
    assert parts["activations"] == 2 * 10 * 2 * 2 * (8 * 8 + 4 * 16), "one policy's at a time: two micro-batches"
    assert LIBRARIES < 1e9
