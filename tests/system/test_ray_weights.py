"""Weights of other times, quantised weights and loops in groups of processes are those of a local run.

Threads stand for processes.
"""

import json
import shutil
from importlib.util import find_spec

import pytest
import ray_groups
from ray_groups import assert_equal, check_cluster
from safetensors.torch import load_file
from tiny_runs import config_of, end_of

from maporl.errors import ConfigError
from maporl.integrations.ray import ray_backend
from maporl.methods.tiny_versions import tiny_version
from maporl.run import ResolvedRun
from maporl.runs import train as run
from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

RAY = {"cluster": {"backend": "ray"}}


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    ray_groups.use(monkeypatch)


@pytest.fixture
def asked(monkeypatch):
    """What the processes were asked of weights before training: the policies, and the numbers of texts."""
    found = []
    ask = ray_backend.RayBackend.ask_untrained

    def noted(self, method, policy, texts, *more):
        found.append((method, policy, len(texts)))
        return ask(self, method, policy, texts, *more)

    monkeypatch.setattr(ray_backend.RayBackend, "ask_untrained", noted)
    return found


def both(folder, updates, sections, **training):
    """What a local run and one in groups leave."""
    ends = []
    for name, more in (("local", {}), ("ray", RAY)):
        config = config_of(folder / name, updates, sections | more, **training)
        assert check_run(config)
        run.train(config, resume=False, quiet=True)
        ends.append(end_of(folder / name, updates))
    return ends


WHOLE_OR_ADAPTERS = [
    pytest.param({}, id="whole"),
    pytest.param({"lora": {"r": 2}}, id="adapters", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("agents", WHOLE_OR_ADAPTERS)
def test_past_opponents_speak_and_are_saved_as_without_groups(agents, tmp_path):
    """They speak in updates 2, 3 and 4. A checkpoint of groups goes on without them, and the other way round."""
    pool = {"opponent_pool": {"agent": "bob", "of": "ann", "every": 1, "keep": 2, "probability": 1.0}}
    sections = {"schedule": pool, "agents": {"ann": agents, "bob": agents}}
    local, there = both(tmp_path, 4, sections, save_total_limit=4)
    assert_equal(there, local)
    said = [json.loads(line) for line in there[2].splitlines()]
    spoke = {u["policy"] for d in said for u in d["utterances"]}
    assert spoke == {"ann", "bob", "ann-past"}
    kept = sorted((tmp_path / "ray/checkpoint-4/others/opponents").iterdir())
    assert [file.name for file in kept] == ["snapshot-0.safetensors", "snapshot-1.safetensors"]
    one, two = map(load_file, kept)
    assert any(not one[name].equal(two[name]) for name in one)
    for name, more in (("local", RAY), ("ray", {})):
        folder = tmp_path / "resumed"
        shutil.copytree(tmp_path / name, folder)
        for left in ("final", "checkpoint-3", "checkpoint-4"):
            shutil.rmtree(folder / left)
        (folder / "config.yaml").unlink()
        trainer = build_trainer(config_of(folder, 4, sections | more, save_total_limit=4), quiet=True)
        trainer.train(resume_from_checkpoint=True)
        assert_equal(end_of(folder, 4), local)
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("agents", WHOLE_OR_ADAPTERS)
def test_the_weights_before_training_restate_answers_as_without_groups(agents, asked, tmp_path):
    """Also those of a frozen policy, which no process trains."""
    sections = {
        "agents": {"ann": agents, "bob": {"trainable": False}}, "restate": "base_model", "warm_start": {"steps": 0},
        "agent_defaults": {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1, "context": 512}},
        "ppo": {"response_length": 3, "temperature": 1.0, "kl_coef": 0.1},
    }  # fmt: skip
    local, there = both(tmp_path, 2, sections)
    for end in (local, there):
        del end[0][
            "checkpoint-2/rng.safetensors"
        ]  # greedy answers take random numbers of the process that samples them
    assert_equal(there, local)
    assert {policy for method, policy, texts in asked if method == "complete" and texts > 0} == {"ann", "bob"}


@pytest.mark.slow
def test_the_reward_nll_asks_the_weights_before_training(asked, tmp_path):
    sections = {
        "reward": {"sources": {"near": 1.0, "nll": 0.1}},
        "agents": {"ann": {}, "bob": {"trainable": False}},
        "ppo": {"response_length": 3, "temperature": 1.0, "kl_coef": 0.1},
    }
    local, there = both(tmp_path, 2, sections)
    assert_equal(there, local)
    assert asked == [("logprobs", "ann", 32), ("logprobs", "bob", 32)] * 2
    records = [json.loads(line) for line in (tmp_path / "ray/metrics.jsonl").read_text().splitlines()]
    assert all(record["reward/nll"] > 0 for record in records)


@pytest.mark.slow
def test_the_updates_of_a_loop_are_made_in_groups(tmp_path):
    """MARLHF's reward model is trained in this process, and its updates in those of the groups."""
    ends = []
    for name, more in (("local", {}), ("ray", RAY)):
        run.train(from_dict(tiny_version("marlhf", str(tmp_path / name)) | more), resume=False, quiet=True)
        weights = {
            str(file.relative_to(tmp_path / name)): load_file(file)
            for file in sorted((tmp_path / name).rglob("*.safetensors"))
            if "initial" not in file.relative_to(tmp_path / name).parts[1:]
        }
        ends.append((weights, (tmp_path / name / "dialogues.jsonl").read_text()))
    (local, spoken), (there, said) = ends
    assert spoken == said and local.keys() == there.keys() and any("train-2/run/final" in name for name in local)
    assert all(value.equal(there[name][key]) for name, tensors in local.items() for key, value in tensors.items())


def test_a_loop_without_updates_has_nothing_for_groups():
    with pytest.raises(ConfigError, match=r"has nothing to do in loop\.stages without train: ppo"):
        check_cluster(ResolvedRun(from_dict(tiny_version("malt", "run") | RAY)))


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra quantized")
@pytest.mark.slow
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_adapters_of_a_quantised_base_are_trained_in_a_group(bits, tiny, tmp_path):
    model, tokenizer = tiny(alphabet="0123456789+=;", hidden_size=384, layers=1)  # as CPU kernels want it
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    agent = {"model": str(tmp_path / "base"), "lora": {"r": 4}, bits: True}
    sections = {
        "agent_defaults": {}, "agents": {"ann": agent, "bob": agent}, "warm_start": {"steps": 0},
        "reward": {"sources": {"near": 1.0}},
    }  # fmt: skip
    local, there = both(tmp_path, 1, sections)
    assert_equal(there, local)
