"""Harnesses of others as commands of ``examples/programs``, each in an environment of its own."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from folders import ROOT
from test_clients import play
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from maporl.runs.train import train
from maporl.validation.load import load

sys.path.append(str(ROOT / "benchmarks/clients"))
from table import clients, install

HOME = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / ".venv-clients"))
CASES = {
    "mini_swe_agent": (
        {
            "solver": [
                'I add.<call>{"name": "bash", "arguments": {"command": "expr 1200 + 34"}}</call>',
                'So.<call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 1234"}}</call>',
            ]
        },
        [("solver", None, ()), ("solver", 0, (0,))],
        (),
    ),
    "aider": (
        {"solver": ["Write 1234."], "checker": ["answer.txt\n```\n1234\n```\n"]},
        [("solver", None, ()), ("checker", None, (0,))],
        ("temperature",),
    ),
    "opencode": (
        {
            "solver": [
                'I ask.<call>{"name": "task", "arguments": {"description": "a sum", "prompt": "1200+34=1234?", '
                '"subagent_type": "checker"}}</call>',
                "1234",
            ],
            "checker": ["It is."],
        },
        [("solver", None, ()), ("checker", None, (0,)), ("solver", 0, (0, 1))],
        (),
    ),
    "claude_code": (
        {
            "solver": [
                'I ask.<call>{"name": "Agent", "arguments": {"description": "a sum", "prompt": "1200+34=1234?", '
                '"subagent_type": "checker"}}</call>',
                "1234",
            ],
            "checker": ["It is."],
        },
        [("solver", None, ()), ("checker", None, (0,)), ("solver", 0, (0, 1))],
        ("thinking", "context_management", "output_config"),
    ),
    "codex": (
        {"solver": ['I add.<call>{"name": "exec_command", "arguments": {"cmd": "expr 1200 + 34"}}</call>', "1234"]},
        [("solver", None, ()), ("solver", 0, (0,))],
        ("client_metadata",),
    ),
}
"""What the agents say, who is asked with which conversation and having read whom, and what is ignored."""


def test_the_pages_say_what_each_harness_needs():
    page = (ROOT / "docs/howto/clients.md").read_text()
    written = re.findall(r"^\| .+ \| `harness_(\w+)\.py` \| (.+?) \| .+? \| (.+?) \| .+ \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in written) == sorted(CASES)
    assert {file.stem for file in (ROOT / "examples/programs").glob("harness_*.py")} == {f"harness_{n}" for n in CASES}
    for name, agents, ignored in written:
        assert re.findall("`(solver|checker)`", agents) == list(CASES[name][0])
        assert tuple(re.findall(r"`(\w+)`", ignored)) == CASES[name][2]
        head = (ROOT / f"examples/programs/harness_{name}.py").read_text().partition("import")[0]
        told = re.search(r"`protocol.ignore: \[(.+)\]`", head)
        assert (tuple(told[1].split(", ")) if told else ()) == CASES[name][2]
    count = {20: "Twenty clients", 5: "five coding\nagents"}
    assert f"{count[len(clients())]} and {count[len(CASES)]}" in (ROOT / "docs/howto/program.md").read_text()


@pytest.fixture
def command(request, monkeypatch):
    """The command of a harness, which is installed as the head of its file says."""
    file = ROOT / f"examples/programs/harness_{request.param}.py"
    installer, package = re.search(r"^(pip|npm) install (?:--global )?(.+)$", file.read_text(), re.MULTILINE).groups()
    folder = HOME / f"harness_{request.param}"
    install(folder, installer, [package], keep=True)
    programs = folder / ("node_modules/.bin" if installer == "npm" else "bin")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return (sys.executable, str(file))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), zip(CASES, CASES, strict=True), indirect=["command"])
def test_a_harness_is_a_team_whose_agents_are_models_by_name(command, name):
    scripts, talk, ignore = CASES[name]
    dialogue, bodies = play(None, scripts, "What is 1200+34?", command=command, ignore=ignore, seconds=120)
    assert "failure" not in dialogue.outcome, dialogue.outcome["failure"]
    assert [(u.agent, u.after, u.parents) for u in dialogue.utterances] == talk
    assert dialogue.outcome["answer"] == "1234"
    assert name == "aider" or "1234" in json.dumps(bodies[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that reads the long prompts of harnesses in pieces of a few characters."""
    folder = tmp_path_factory.mktemp("model")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, letters = ["<pad>", "<eos>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    raw.train([str(ROOT / "docs/rewards.md"), str(ROOT / "README.md")], trainer)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", chat_template=template
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=32768, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    with torch.no_grad():  # it says nothing or little: a harness may fail at an answer that is cut off
        llama.model.embed_tokens.weight[:, 0], llama.lm_head.weight[1, 0] = 10.0, 1.75
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), zip(CASES, CASES, strict=True), indirect=["command"])
def test_the_agents_of_a_harness_learn(command, name, model, tmp_path):
    agents = list(CASES[name][0])
    config = {
        "output_dir": str(tmp_path / "run"),
        "updates": 2,
        "task": {"name": "toy_sum", "largest": 1},
        "agents": {agent: {"model": str(model)} for agent in agents},
        "protocol": {"name": "program", "command": list(command), "ignore": list(CASES[name][2])},
        "ppo": {"response_length": 8, "temperature": 1.0},
        "training": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.0,
            "critic": "none",
            "use_cpu": True,
            "on_void": "warn",
        },
        "evaluation": {"questions": 0},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    train(load(tmp_path / "mine.yaml"), resume=False, quiet=True)
    updates = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [update["program/failed"] for update in updates] == [0.0, 0.0]
    for agent in agents if name == "aider" else ["solver"]:  # who knows nothing asks no sub-agent
        assert all(update[f"{agent}/val/first_ratio"] == pytest.approx(1.0, abs=1e-4) for update in updates)
