"""Runs of seconds from a configuration: what they leave, how to start one as a process, one update of one, and cross-play between them."""

import json

import processes
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.parse import to_yaml
from maporl.runs.train import train
from maporl.studies.crossplay.result import CrossPlay, CrossTeam
from maporl.validation.load import from_dict

UPDATES = 8


def config_of(folder, updates=UPDATES, sections=None, **training):
    return from_dict(
        {
            "output_dir": str(folder),
            "task": {"name": "toy_sum", "largest": 9},
            "agent_defaults": {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}},
            "agents": {"ann": {}, "bob": {}},
            "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
            "warm_start": {"steps": 3},
            "updates": updates,
            "ppo": {"response_length": 3, "num_ppo_epochs": 2, "temperature": 1.0},
            "training": {
                "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-2,
                "save_steps": 1, "save_total_limit": 2, **training,
            },
            "evaluation": {"questions": 0},
            "seed": 3,
            **(sections or {}),
        }
    )  # fmt: skip


def end_of(folder, updates=UPDATES):
    """What a finished run leaves: its weights, and its records without times."""
    weights = {
        str(p.relative_to(folder)): load_file(p) for name in ("final", f"checkpoint-{updates}") for p in sorted((folder / name).rglob("*.safetensors"))
    }  # fmt: skip
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocked = ("time/", "tokens_per_second", "memory/", "tools/seconds")
    kept = [{k: v for k, v in record.items() if not k.startswith(clocked)} for record in records]
    return weights, kept, (folder / "dialogues.jsonl").read_text()


def assert_same_end(one, other):
    (weights, records, dialogues), (other_weights, other_records, other_dialogues) = one, other
    assert records == other_records and dialogues == other_dialogues
    assert weights.keys() == other_weights.keys() and len(weights) > 6
    for name, tensors in weights.items():
        for key, value in tensors.items():
            assert value.equal(other_weights[name][key]), f"{name}: {key}"


def start(folder, config, *options):
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    return processes.start(["-m", "maporl", "train", file, "-q", *options])


TINY = {
    "updates": 4,
    "task": {"name": "toy_sum", "largest": 9},
    "agents": {"ann": {"tiny": {"hidden_size": 32, "layers": 1, "heads": 2}},
     "bob": {"tiny": {"hidden_size": 32, "layers": 1, "heads": 2, "architecture": "qwen3"}}},
    "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "warm_start": {"steps": 3, "batch_size": 8},
    "ppo": {"response_length": 4, "temperature": 1.0},
    "training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-3},
    "evaluation": {"questions": 10},
}  # fmt: skip


TINY_SECTION = {"hidden_size": 32, "layers": 1, "heads": 2, "alphabet": "0123456789+= :;?abp_XO/JQK|"}


def scheduled_config(folder, **changes):
    base = {
        "output_dir": str(folder / "run"),
        "task": {"name": "toy_sum", "largest": 9},
        "agent_defaults": {"tiny": TINY_SECTION},
        "agents": {"ann": {}, "bob": {}},
        "protocol": {"name": "debate", "turns": 1},
        "updates": 3,
        "ppo": {"response_length": 3, "num_ppo_epochs": 1, "temperature": 1.0, "missing_eos_penalty": 1.0},
        "training": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "use_cpu": True,
            "learning_rate": 1e-2,
        },
        "evaluation": {"questions": 0},
        "seed": 3,
    }
    return from_dict({**base, **changes})


def one_update(trainer):
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.dialogues
    rows = trainer.advantage(batch).token_batches
    metrics = trainer.update(batch).metrics
    trainer.state.global_step += 1
    trainer.episodes += trainer.args.local_batch_size
    return answers, rows, metrics


def played(results, runs=("one", "two"), seats=("ann", "bob"), **more):
    return CrossPlay(runs, seats, tuple(CrossTeam(team, right) for team, right in results.items()), **more)


TWO = {
    (0, 0): (1.0, 1.0, 1.0, 0.5),
    (0, 1): (0.5, 0.0, 1.0, 0.5),
    (1, 0): (0.5, 0.0, 1.0, 0.0),
    (1, 1): (1.0, 0.0, 1.0, 1.0),
}
SPLIT = {"name": "toy_sum", "largest": 4, "held_out": 0.5, "seed": 0}


def trained(folder, seed, **changes):
    """A finished run, whose warm start is long enough that the teams differ in what they get right."""
    warm = {"steps": 60, "batch_size": 16, "learning_rate": 5e-3, "wrong": 0.0}
    values = {**TINY, "output_dir": str(folder), "seed": seed, "updates": 1, "task": SPLIT, "warm_start": warm}
    train(from_dict({**values, "evaluation": {"questions": 12}} | changes), resume=False, quiet=True)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Three runs of one split, whose seeds differ. Tests must not change them."""
    root = tmp_path_factory.mktemp("cross")
    return [trained(root / f"seed{seed}", seed) for seed in (1, 2, 3)]


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])
