"""Every experiment of MAPoRL that ships runs two updates: its models, data and verifier replaced by tiny ones."""

import json

import pytest
import yaml
from folders import ROOT
from stand_ins import (
    small,
    stand_ins,  # noqa: F401  # fixtures
)

from maporl.config.parse import read_yaml
from maporl.protocols import turns_of
from maporl.runs import train as run
from maporl.validation import preflight as run_checks
from maporl.validation.load import from_dict

CONFIGS = sorted((ROOT / "configs" / "ppo").glob("maporl_*.yaml"))
QUICK = ("maporl_gsm8k_hetero",)


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
