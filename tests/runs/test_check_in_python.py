"""``maporl.check``: the lines of the command, for a trainer of Python, which trains afterwards as if nothing had been."""

import os
import runpy

import pytest
from folders import ROOT
from notebook_runs import ALPHABET, DEBATE, HELD_OUT, READABLE, TASK, args
from typer.testing import CliRunner

import maporl
from maporl import Agent, MultiAgentPPOTrainer, RewardSection, Team
from maporl.cli.main import app
from maporl.report.read import read_run


@pytest.fixture
def trainer(tiny, tmp_path):
    def build(folder="run", reward=READABLE, **options):
        sizes = {"hidden_size": 32, "layers": 1, "alphabet": ALPHABET}
        names = {"ann": "llama", "bob": "qwen3"}
        agents = [Agent(name, *tiny(kind, seed=3, **sizes)) for name, kind in names.items()]
        return MultiAgentPPOTrainer(args(tmp_path / folder, **options), Team(agents), TASK, DEBATE, HELD_OUT, reward)

    return build


def test_it_prints_what_the_command_prints_for_the_same_run(trainer, tmp_path, capsys):
    made = trainer()
    maporl.check(made)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "task toy_sum: 80 questions, 20 held out"
    assert (
        printed[1] == "agents: ann (LlamaForCausalLM of 13,376 parameters), bob (Qwen3ForCausalLM of 13,392 parameters)"
    )
    assert f"run: 2 updates of 4 questions into {tmp_path}/run" in printed and printed[-1] == "ok"
    made.train()
    command = CliRunner().invoke(app, ["check", str(tmp_path / "run/config.yaml"), "--set", f"output_dir={tmp_path}/x"])
    lines = command.output.replace(f"{tmp_path}/x", f"{tmp_path}/run").splitlines()
    assert [line for line in lines if not line.startswith("agents: ")] == [printed[0], *printed[2:]]


def test_a_check_changes_nothing_of_the_run(trainer):
    ends = []
    for folder, checked in (("one", True), ("two", False)):
        made = trainer(folder)
        if checked:
            maporl.check(made)
        made.train()
        clocked = ("time/", "tokens_per_second", "memory/")
        records = read_run(made.args.output_dir).updates()
        ends.append([{k: v for k, v in record.items() if not k.startswith(clocked)} for record in records])
    assert ends[0] == ends[1]


def test_parts_of_python_are_named(trainer, capsys):
    made = trainer(reward=RewardSection(sources={"label": 1.0}))
    made.parts.callbacks.append(type("Watch", (maporl.training.team_loop.TeamProgress,), {})())
    maporl.check(made)
    assert "only in Python: training.callbacks.Watch (" in capsys.readouterr().out


def test_the_example_of_two_adapters_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "OUTPUT", str(tmp_path / "run"))
    runpy.run_path(str(ROOT / "examples/06_two_adapters.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "credit: ann: the mean credit of those who are shown it (bob); bob: answers (label 1)" in printed
    assert "ann: 1,024 of 15,808 parameters are its own and learn\nbob: 1,024 of 15,808" in printed
    assert (tmp_path / "run/report.html").is_file()
