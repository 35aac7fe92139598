"""Runs with tools and an environment repeat: with 1 and 32 threads, in one and two processes, killed and resumed."""

import json
import os
import subprocess
import sys
import time

import processes
import pytest
import torch
import yaml
from folders import ROOT
from launches import free_port, ranks_of
from safetensors.torch import load_file

from maporl.environments.workers import Workers
from maporl.runs.build import build_trainer
from maporl.validation.load import load

MODULE = '''
"""Tools, an environment with a seed, and untrained models that call: what they sample decides which call it is."""

import json
import random
import time

from maporl import Environment, Tool
from maporl.engines import text as engine
from maporl.environments.calls import JsonFormat, Written
from maporl.types import Stop

CALLS = [[], [("double", {"n": 4})], [("roll", {}), ("fail", {})], [("roll", {}), ("double", {"n": 5}), ("roll", {})]]
KEPT = engine.reply_of


def read(self, text, prompt_ids, response_ids):
    return [Written(*call) for call in CALLS[sum(response_ids) % 4]]


def whole(*parts):
    reply = KEPT(*parts)
    reply.stop = Stop.EOS
    return reply


JsonFormat.read, engine.reply_of = read, whole


def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    time.sleep(random.random() / 500)  # results come in another order each time
    return 2 * n


def fail() -> str:
    """Fail always."""
    raise RuntimeError("no")


class Dice(Environment):
    """Rolls by its seed, and pays what was rolled."""

    def reset(self, seed, row):
        self.rng, self.total = random.Random(seed), 0
        return "d"

    def tools(self, agent):
        def roll() -> int:
            """Roll the dice."""
            number = self.rng.randint(1, 6)
            self.total += number
            return number

        return [Tool.of(roll)]

    def reward(self):
        return float(self.total)
'''
CALLING = {
    "tiny": {"alphabet": "0123456789+=;?: abcdefghijklmnopqrstuvwxyz", "hidden_size": 16, "layers": 1, "heads": 2, "context": 600},
    "call_format": "json",
    "call_texts": {"intro": "", "line": "", "json": "", "returned": "={text};", "failed": "?;", "limit": ";"},
    "tools": ["double", "fail", "dice"],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    """The folder of the module, which only the runs import that need its models that call."""
    folder = tmp_path_factory.mktemp("calling")
    (folder / "calling.py").write_text(MODULE)
    return folder


def written(folder, module, batch=4, updates=3, **changes):
    config = {
        "output_dir": str(folder / "run"),
        "task": {"name": "toy_sum"},
        "agents": {"ann": CALLING, "bob": CALLING},
        "tools": {name: {"use": f"calling:{name}"} for name in ("double", "fail")},
        "environments": {"dice": {"use": "calling:Dice"}},
        "reward": {"sources": {"label": 1.0, "dice": 0.1}},
        "protocol": {"name": "debate", "turns": 2, "opening": "{question}"},
        "ppo": {"response_length": 4},
        "training": {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1, "use_cpu": True, "save_steps": 1,
            "learning_rate": 1e-3,
        },
        "evaluation": {"questions": 4},
        "updates": updates,
        "pythonpath": [str(module)],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config | changes))
    return folder / "config.yaml"


def records(folder):
    """The dialogues of a run, without the seconds of their calls."""
    lines = (folder / "run/dialogues.jsonl").read_text().splitlines()
    return [_timeless(json.loads(line)) for line in lines]


def _timeless(value):
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key != "seconds"}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def weights(folder):
    return {
        f"{name}.{key}": value
        for name in ("ann", "bob")
        for key, value in load_file(folder / f"run/final/{name}/model.safetensors").items()
    }


def metrics(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def run(words, variables=()):
    done = processes.run(["-m", "maporl", "train", *words, "-q"], os.environ | dict(variables))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, module):
    """The folder of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    run([written(folder, module)], {"OMP_NUM_THREADS": "1"})
    return folder


@pytest.mark.slow
def test_calls_happen_and_every_environment_is_closed(alone):
    rows = [row for row in metrics(alone) if "env/dice/opened" in row]
    assert len(rows) == 3
    for row in rows:  # those of evaluations are not counted
        assert row["env/dice/opened"] == row["env/dice/closed"] == 4.0
        assert min(row[f"tools/{name}/calls"] for name in ("double", "fail", "roll")) > 0
        assert row["tools/fail/failed"] == row["tools/fail/calls"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_is_not(alone, tmp_path, module):
    path = written(tmp_path, module)
    process = processes.start(["-m", "maporl", "train", path, "-q"], os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 200
    while not (tmp_path / "run/checkpoint-1").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert (tmp_path / "run/checkpoint-1").exists() and not (tmp_path / "run/final").exists()
    run([path, "--resume"], {"OMP_NUM_THREADS": "1"})
    assert records(tmp_path) == records(alone)
    own, expected = weights(tmp_path), weights(alone)
    assert own.keys() == expected.keys() and all(torch.equal(own[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_two_processes_play_and_learn_as_one(alone, tmp_path, module):
    path = written(tmp_path, module, batch=2)
    done = processes.end_of(ranks_of(["-m", "maporl", "train", path, "-q"], 2), 300)
    assert done.returncode == 0, done.stderr[-2000:]
    own, expected = weights(tmp_path), weights(alone)
    assert own.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(own[key], value, atol=1e-5, rtol=0)
    both = zip(metrics(tmp_path), metrics(alone), strict=True)
    counted = 0
    for mine, theirs in both:
        names = [name for name in theirs if name.startswith(("tools/", "env/", "turns/end/")) and "seconds" not in name]
        assert {name: mine.get(name) for name in names} == {name: theirs[name] for name in names}
        counted += len(names)
    assert counted > 20


@pytest.mark.slow
def test_accelerate_starts_two_processes_that_learn_to_call_as_one(tmp_path):
    """``configs/ppo/calculator.yaml``, smaller, with a warm start that makes its agents call."""
    launcher = [
        "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu_two_processes.yaml",
        "--main_process_port", str(free_port()),
    ]  # fmt: skip
    for count, batch, words in ((1, 8, []), (2, 4, launcher)):
        options = {
            "output_dir": tmp_path / f"{count}/run", "updates": 2, "task.largest": 9, "warm_start.steps": 60,
            "warm_start.calls": 0.9, "training.per_device_train_batch_size": batch, "evaluation.questions": 8,
        }  # fmt: skip
        changed = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, *words, "train_multi_agent.py", "--config", "configs/ppo/calculator.yaml", *changed]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=ROOT, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = tmp_path / "1", tmp_path / "2"
    own, expected = weights(two), weights(one)
    for key, value in expected.items():
        torch.testing.assert_close(own[key], value, atol=3e-5, rtol=0)  # a tenth of a step
    for mine, theirs in zip(metrics(two), metrics(one), strict=True):
        names = [
            name for name in theirs if name.startswith(("tools/", "calls/", "turns/end/")) and "seconds" not in name
        ]
        assert {name: mine.get(name) for name in names} == {name: theirs[name] for name in names}
    assert any(row.get("tools/calculator/calls", 0) > 0 for row in metrics(one))


@pytest.mark.slow
def test_one_thread_and_thirty_two_give_the_same_records(tmp_path, module, monkeypatch):
    from maporl.engines import text
    from maporl.environments.calls import JsonFormat

    monkeypatch.setattr(JsonFormat, "read", JsonFormat.read)  # both are put back at the end
    monkeypatch.setattr(text, "reply_of", text.reply_of)
    seen = []
    for most in (1, 32):
        folder = tmp_path / str(most)
        trainer = build_trainer(load(written(folder, module, updates=1)), quiet=True)
        trainer.player.world.workers = Workers(most)
        trainer.train()
        seen.append(records(folder))
    assert seen[0] == seen[1] and any(u["calls"] for record in seen[0] for u in _utterances(record))


def _utterances(record):
    return record.get("dialogue", record)["utterances"]
