"""Harnesses that know nothing of this project measure a served team, each in an environment of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from folders import ROOT
from test_api import listening
from tiny_runs import config_of

from maporl.cli.common import load_team_config
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.runs.evaluate import evaluate
from maporl.runs.train import train

sys.path.append(str(ROOT / "benchmarks/clients"))
from table import install

HOME = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / ".venv-clients"))
KEYS = {"MAPORL_API_KEY": "any", "OPENAI_API_KEY": "any"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A served team that knows some sums, the folder with its questions, and what its own evaluation says of it."""
    folder = tmp_path_factory.mktemp("measured")
    sections = {
        "agents": {"ann": {}, "bob": {}, "cy": {}},
        "protocol": {"name": "debate", "turns": 1},
        "warm_start": {"steps": 200, "learning_rate": 5e-3},
        "evaluation": {"questions": 20, "temperature": 0.0},
    }
    train(config_of(folder / "run", updates=1, sections=sections, learning_rate=1e-5), resume=False, quiet=True)
    config, weights = load_team_config([str(folder / "run")], None, None, None)
    evaluation = evaluate(config, weights)
    player = loaded_player(ResolvedRun(config), weights)
    dialogues = player.play_evaluation(ResolvedRun(config).held_out, 20, config.evaluation.decoding, config.seed)
    with listening(folder / "run") as served:
        task = served.owner.served.task
        lines = [json.dumps({"question": task[n].question, "answer": task[n].answer}) for n in range(20)]
        (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
        for file in (ROOT / "examples/evaluate").iterdir():
            shutil.copy(file, folder)
        shares = {name: evaluation.baselines[f"{name} alone"].value for name in ("ann", "bob", "cy")}
        ties = [votes_of(dialogue).most_common(2) for dialogue in dialogues]
        ties = sum(len(votes) > 1 and votes[0][1] == votes[1][1] for votes in ties)
        shares["team"] = sum(votes_of(d).most_common(1)[0][0] == d.example.answer for d in dialogues) / 20
        # of a tie an evaluation counts the share of the right answer, and a reply is the first one
        assert abs(evaluation.turns[-1].majority.value - shares["team"]) <= ties / 20 < 0.5
        assert len(set(shares.values())) > 1 and all(value > 0 for value in shares.values()), shares
        yield served, folder, shares


def votes_of(dialogue):
    """The final answers of a dialogue, with how many gave each, in order of speaking."""
    return Counter(u.grade.answer for u in dialogue.at(0) if u.grade.answer is not None)


def said_by(command, folder, **variables):
    done = subprocess.run([str(word) for word in command], cwd=folder, env=os.environ | KEYS | variables,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ann", "bob", "cy", "team"])
def test_inspect_measures_what_an_evaluation_measures(measured, model):
    served, folder, shares = measured
    install(HOME / "inspect_ai", "pip", ["inspect_ai", "openai"], keep=True)
    told = said_by(
        [HOME / "inspect_ai/bin/inspect", "eval", "inspect_task.py", "-T", "file=questions.jsonl", "--display", "plain"],
        folder, MAPORL_BASE_URL=f"{served.url}/v1", INSPECT_EVAL_MODEL=f"openai-api/maporl/{model}",
    )  # fmt: skip
    assert float(re.search(r"accuracy +([0-9.]+)", told)[1]) == pytest.approx(shares[model], abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ann", "team"])
def test_lm_eval_measures_what_an_evaluation_measures(measured, model):
    served, folder, shares = measured
    install(HOME / "lm_eval", "pip", ["lm_eval[api]"], keep=True)
    address = f"model={model},base_url={served.url}/v1/chat/completions,num_concurrent=8"
    told = said_by(
        [HOME / "lm_eval/bin/lm-eval", "run", "--model", "local-chat-completions", "--tasks", "products",
         "--include_path", ".", "--apply_chat_template", "--model_args", address], folder,
    )  # fmt: skip
    assert float(re.search(r"exact_match\|.\s*\|\s*([0-9.]+)", told)[1]) == pytest.approx(shares[model], abs=5e-5)
