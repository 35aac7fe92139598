"""Every experiment of MAPoRL that ships runs two updates: its models, data and verifier replaced by tiny ones."""

import json

import pytest
import yaml
from folders import ROOT
from stand_ins import (
    small,
    stand_ins,  # noqa: F401  # fixtures
)
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.parse import read_yaml
from maporl.methods.tiny_versions import tiny_version
from maporl.protocols import turns_of
from maporl.runs import train as run
from maporl.validation import preflight as run_checks
from maporl.validation.load import from_dict

CONFIGS = sorted((ROOT / "configs" / "ppo").glob("maporl_*.yaml"))
QUICK = ("maporl_gsm8k_hetero",)


@pytest.mark.slow
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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_head_names_how_to_run_it_tiny_and_so_it_checks(path, tmp_path):
    head = path.read_text().split("\nextends:")[0].split("\noutput_dir:")[0]
    assert f"maporl recipes try configs/ppo/{path.name}" in head
    whole, tiny = from_dict(read_yaml(path)), from_dict(tiny_version(str(path), str(tmp_path / "run")))
    assert (tiny.reward.bonus, tiny.schedule, tiny.updates) == (whole.reward.bonus, whole.schedule, 3)
    assert {name: agent.policy_per for name, agent in tiny.agents.items()} == {
        name: agent.policy_per for name, agent in whole.agents.items()
    }
    assert not [line for line in run_checks.check_run(tiny) if line.startswith("warning")]


@pytest.mark.slow
def test_it_runs_tiny_without_a_download(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["recipes", "try", str(ROOT / "configs/ppo/maporl_gsm8k_2x2_label.yaml")])
    assert done.exit_code == 0, done.output
    assert "update 3: reward/" in done.output and done.output.rstrip().endswith("report.html")


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
