"""Harnesses of others as commands of ``examples/programs``, each in an environment of its own."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from folders import ROOT
from test_clients import play

sys.path.append(str(ROOT / "benchmarks/clients"))
from table import install

HOME = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / ".venv-clients"))


def asks_by(tool, *ignored):
    """A solver that asks the checker, its sub-agent, by a call of ``tool``."""
    asked = {"description": "a sum", "prompt": "1200+34=1234?", "subagent_type": "checker"}
    asks = f"I ask.<call>{json.dumps({'name': tool, 'arguments': asked})}</call>"
    talk = [("solver", None, ()), ("checker", None, (0,)), ("solver", 0, (0, 1))]
    return {"solver": [asks, "1234"], "checker": ["It is."]}, talk, ignored


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
    "opencode": asks_by("task"),
    "claude_code": asks_by("Agent", "thinking", "context_management", "output_config"),
    "codex": (
        {"solver": ['I add.<call>{"name": "exec_command", "arguments": {"cmd": "expr 1200 + 34"}}</call>', "1234"]},
        [("solver", None, ()), ("solver", 0, (0,))],
        ("client_metadata",),
    ),
}
"""What the agents say, who is asked with which conversation and having read whom, and what is ignored."""


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
