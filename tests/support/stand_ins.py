"""The configurations of MAPoRL and of published tables with tiny models, verifiers and data in the place of theirs."""

import json
import string

import pytest
from folders import ROOT
from one_policy import saved_verifier

from maporl.config.parse import read_yaml
from maporl.config.schema import TinySection
from maporl.playground import tiny_versions
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.validation.load import from_dict

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
CODE = "def simple_math_problem():\n    return {a} + {b}\n"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Folders: two models of different architectures, a verifier, and data of both kinds."""
    root = tmp_path_factory.mktemp("stand-ins")
    for name, architecture in (("first", "llama"), ("second", "qwen3")):
        section = TinySection(architecture=architecture, alphabet=ALPHABET, hidden_size=64, layers=2, context=8192)
        tokenizer = build_tiny_tokenizer(section)
        build_tiny_model(section, tokenizer).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    saved_verifier(tokenizer, root / "verifier")
    tiny_gsm = [
        {"id": f"t{i}", "question": f"Ann has {i} and {i + 1}. How many?", "code": CODE.format(a=i, b=i + 1)}
        for i in range(16)
    ]
    anli = [{"id": f"a{i}", "question": f"Premise: {i}", "answer": "neutral"} for i in range(16)]
    for name, rows in (("tinygsm.jsonl", tiny_gsm), ("anli.jsonl", anli)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def small(path, root, folder):
    """The configuration at ``path`` with everything heavy replaced, and nothing else."""
    values = read_yaml(path)
    agents = [values["agent_defaults"], *values["agents"].values()]
    names = dict.fromkeys(agent["model"] for agent in agents if "model" in agent)  # in order of first mention
    models = dict(zip(names, (str(root / "first"), str(root / "second")), strict=False))
    for agent in agents:
        if "model" in agent:
            agent["model"] = models[agent["model"]]
        agent.pop("pad_token", None)
    values["agent_defaults"]["load_in_4bit"] = False
    values["agent_defaults"]["dtype"] = "float32"
    data = str(root / f"{values['task']['name']}.jsonl")
    values["task"] |= {"source": data} | (
        {"held_out": 4} if values["task"]["name"] == "tinygsm" else {"eval_source": data}
    )
    if values["reward"].get("verifier"):
        values["reward"]["verifier"]["model"] = str(root / "verifier")
    if values["reward"].get("penalties"):
        values["reward"]["penalties"]["min_tokens"] = 2
    values["ppo"] |= {"response_length": 6, "num_mini_batches": min(values["ppo"]["num_mini_batches"], 2)}
    values["training"] |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    values["training"] |= {"use_cpu": True, "save_steps": 0}
    values |= {"updates": 2, "output_dir": str(folder / "run"), "evaluation": {"questions": 2}}
    return from_dict(values)


FOLDER = ROOT / "configs/ppo/reproduce"


def tiny_values(name, folder, monkeypatch):
    monkeypatch.setattr(tiny_versions, "recipe_file", lambda name: FOLDER / f"{name}.yaml")
    return tiny_versions.tiny_version(name, folder)
