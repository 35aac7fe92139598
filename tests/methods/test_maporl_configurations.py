"""Every experiment of MAPoRL that ships runs two updates: its models, data and verifier replaced by tiny ones."""

import json

import pytest
from folders import ROOT
from recipe_runs import (
    small,
    stand_ins,  # noqa: F401  # fixtures
)

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
def test_its_tiny_version_keeps_its_bonus_and_schedule_and_checks(path, tmp_path):
    whole, tiny = from_dict(read_yaml(path)), from_dict(tiny_version(str(path), str(tmp_path / "run")))
    assert (tiny.reward.bonus, tiny.schedule, tiny.updates) == (whole.reward.bonus, whole.schedule, 3)
    assert {name: agent.policy_per for name, agent in tiny.agents.items()} == {
        name: agent.policy_per for name, agent in whole.agents.items()
    }
    assert not [line for line in run_checks.check_run(tiny) if line.startswith("warning")]
