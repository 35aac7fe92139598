"""The bytes that one of two processes keeps for a whole team, frozen agents and past opponents too
(docs/scaling.md)."""

import json

import pytest
import torch
from launches import memory_of, skip_unless_here
from peft import LoraConfig, get_peft_model

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_model, build_tiny_tokenizer

SECTION = TinySection(hidden_size=192, layers=2)
LORA = {"lora": {"r": 1, "target_modules": ["q_proj"]}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A bfloat16 model in a folder, and an adapter of it that changes what it says."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    tokenizer = build_tiny_tokenizer(SECTION)
    model = build_tiny_model(SECTION, tokenizer).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    options = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, options).save_pretrained(folder / "adapter")
    return folder


def kept(folder, name, agents, kl_coef=0.0, **more):
    """Train a team for two updates in one process, and in two under strategy ``name``; returns what the two kept."""
    found = {}
    for number, strategy in ((1, "Holder"), (2, name)):
        own = folder / str(number)
        own.mkdir()
        config = {
            "output_dir": str(own / "run"), "task": {"name": "toy_sum", "largest": 9}, "agents": agents, "updates": 2,
            "protocol": {"name": "debate", "turns": 1, "agents": ["ann", "bob", "cat"]}, "seed": 3,
            "ppo": {"response_length": 3, "num_ppo_epochs": 1, "kl_coef": kl_coef, "temperature": 1.0},
            "training": {
                "per_device_train_batch_size": 4 // number, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
                "use_cpu": not strategy.startswith("Zero"), "critic": "none",
            },
            "advantage": {"returns": "utterance", "baseline": "none", "scale": "none"}, "evaluation": {"questions": 0}, **more,
        }  # fmt: skip
        (own / "config.json").write_text(json.dumps(config))
        found[number] = memory_of(own, strategy, number)
    [alone], together = found[1], found[2]
    for rank in together:
        assert rank["strategy"] == name.split("-")[0] and rank["bases"] == alone["bases"]
        assert rank["sum"] == rank["sum after"] == alone["sum"] > 0, "the frozen weights are the main process's"
    said = [
        [json.loads(line)["utterances"] for line in (folder / part / "run/dialogues.jsonl").read_text().splitlines()]
        for part in ("1", "2")
    ]
    # the rounded weights of the second update may be neighbours, because gradients are summed in another order
    assert said[0][:4] == said[1][:4] and len(said[0]) == len(said[1]) == 8
    for one, two in zip(said[0][4:], said[1][4:], strict=True):
        assert [u["policy"] for u in one] == [u["policy"] for u in two]
        assert one[0]["prompt_ids"] == two[0]["prompt_ids"]
    return together


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Sharded", "Holder", "Zero-3"])
def test_frozen_agents_and_past_opponents_are_distributed_as_policies_are(base, tmp_path, name):
    skip_unless_here(name)
    agents = {
        "ann": {"model": str(base / "model")},
        "bob": {"model": str(base / "model"), "lora": LORA["lora"]},
        "cat": {"model": str(base / "model"), "trainable": False},
        "dan": {"model": str(base / "model"), "adapter": str(base / "adapter"), "trainable": False},  # on bob's base
    }
    judge = {
        "sources": {"judge": 1.0},
        "judge": {"agent": "dan", "unreadable": 0.5, "prompt": "{answer}", "pattern": "[0-9]"},
    }
    pool = {"opponent_pool": {"agent": "cat", "of": "ann", "every": 1, "probability": 1.0}}
    found = kept(tmp_path, name, agents, schedule=pool, reward=judge)
    # ann's weights and master weights, bob's base, cat, ann's past
    expected = {"Holder": 2 + 4 + 2 + 2 + 2, "Sharded": (4 + 2 + 2 + 2) / 2, "Zero-3": (2 + 4 + 4 + 2 + 2 + 2) / 2}
    for rank, own in enumerate(found):
        assert own["built"] == pytest.approx(expected[name], abs=0.6)  # DeepSpeed has a bucket for each trained policy
        assert own["read"] == [["cpu"] * 3, ["meta"] * 3][rank], "only the main process reads models"


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"warm_start": {"steps": 2}}])
def test_the_main_process_alone_reads_the_base_that_adapters_share(base, tmp_path, more):
    agents = {
        "ann": {"model": str(base / "model"), **LORA},
        "bob": {"model": str(base / "model"), "adapter": str(base / "adapter")},
        "cat": {"model": str(base / "model"), "trainable": False},
    }
    found = kept(tmp_path, "Holder", agents, kl_coef=0.05, **more)
    for rank, own in enumerate(found):
        assert own["built"] == pytest.approx(2 + 2, abs=0.35) and own["bases"] == 2
        assert own["read"] == [["cpu"] * 2, ["meta"] * 2][rank]
