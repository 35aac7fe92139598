"""A run of seconds from a configuration, what it leaves, and how to start it as a process."""

import json

import processes
from safetensors.torch import load_file

from maporl.config.parse import to_yaml
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
