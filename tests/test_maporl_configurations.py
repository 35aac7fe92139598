"""Every experiment of MAPoRL that ships runs two updates: its models, data and verifier replaced by tiny ones."""

import json
import string
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForSequenceClassification

from maporl.config.parse import read_yaml
from maporl.protocols import turns_of
from maporl.runs import train as run
from maporl.validation import preflight as run_checks
from maporl.validation.load import from_dict

CONFIGS = sorted((Path(__file__).parents[1] / "configs" / "ppo").glob("maporl_*.yaml"))
QUICK = ("maporl_gsm8k_hetero",)
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
CODE = "def simple_math_problem():\n    return {a} + {b}\n"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Folders: two models of different architectures, a verifier, and data of both kinds."""
    from maporl.config.schema import TinySection
    from maporl.tiny import build_tiny_model, build_tiny_tokenizer

    root = tmp_path_factory.mktemp("stand-ins")
    for name, architecture in (("first", "llama"), ("second", "qwen3")):
        section = TinySection(architecture=architecture, alphabet=ALPHABET, hidden_size=64, layers=2, context=8192)
        tokenizer = build_tiny_tokenizer(section)
        build_tiny_model(section, tokenizer).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(shape).save_pretrained(root / "verifier")
    tokenizer.save_pretrained(root / "verifier")
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
    names = dict.fromkeys(
        a["model"] for a in [values["agent_defaults"], *values["agents"].values()] if "model" in a
    )  # in order of first mention
    models = dict(zip(names, (str(root / "first"), str(root / "second")), strict=False))
    for agent in [values["agent_defaults"], *values["agents"].values()]:
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
    values["ppo"] |= {"response_length": 6, "num_mini_batches": min(values["ppo"]["num_mini_batches"], 2)}
    values["training"] |= {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "use_cpu": True,
        "save_steps": 0,
    }
    values |= {"updates": 2, "output_dir": str(folder / "run"), "evaluation": {"questions": 2}}
    return from_dict(values)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem) for path in CONFIGS],
)
def test_it_checks_and_runs_two_updates(path, stand_ins, tmp_path, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    config = small(path, stand_ins, tmp_path)
    run_checks.check_run(config)
    run.train(config, resume=False, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "tokens_per_second" in line]
    assert [line["step"] for line in updates] == [1, 2]
    assert f"accuracy/turn_{turns_of(config)}" in updates[-1]
    assert any(name.endswith("grad_norm") and value > 0 for name, value in updates[-1].items())
    assert (tmp_path / "run" / "final").is_dir()


def test_the_experiments_of_the_paper_are_all_there():
    assert {p.stem for p in CONFIGS} >= {
        "maporl_gsm8k_2x2_label", "maporl_gsm8k_2x3", "maporl_gsm8k_3x3_verifier", "maporl_gsm8k_2x3_turnwise",
        "maporl_anli_3x3", "maporl_gsm8k_hetero", "maporl_gsm8k_hetero_llama",
    }  # fmt: skip


def test_the_alpha_sweep_is_one_override():
    path = next(p for p in CONFIGS if p.stem == "maporl_gsm8k_2x3")
    values = read_yaml(path)
    for alpha in (0, 1, 2):
        values["reward"]["bonus"] = {"alpha": [alpha, 0, 0, 0]}
        assert from_dict(yaml.safe_load(yaml.safe_dump(values))).reward.bonus.alpha == [alpha, 0, 0, 0]
