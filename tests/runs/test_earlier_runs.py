"""What an earlier version wrote is read: its runs load, report, evaluate and resume, and its teams speak.

``tests/golden/run_of_0_1.tar.xz`` is a run of two updates by commit 0e81a74d, with a saved team of it and the metrics of
the third update that the same commit went on to.
"""

import json
import tarfile

import pytest
from folders import ROOT

from maporl import Team, load
from maporl.report.page import write_report
from maporl.report.read import read_run
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.runs.train import train
from maporl.tasks import build_task

OF_TIMES = ("time/", "memory/", "tokens_per_second")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ROOT / "tests/golden/run_of_0_1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_an_earlier_run_is_read_and_drawn(earlier):
    run = read_run(earlier)
    assert [metrics["step"] for metrics in run.metrics] == [1, 2]
    assert "held out" in write_report([earlier]).read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("weights", ["final", "checkpoint-2/policies", "team"])
def test_an_earlier_team_says_what_it_said(earlier, weights):
    config = load(earlier / "config.yaml")
    player = loaded_player(ResolvedRun(config), earlier / weights)
    task = build_task(config.task, "eval", config.seed)
    said = player.play_evaluation(task, 4, config.evaluation.decoding, config.seed)
    saved = rows(earlier / "evaluation_after.jsonl")
    assert [u.text for d in said for u in d.utterances] == [u["text"] for d in saved for u in d["utterances"]]
    assert len(saved) == 4 and sorted(Team.from_pretrained(str(earlier / "team")).agents) == ["ann", "bob"]


def test_an_earlier_run_goes_on_as_it_would_have(earlier):
    train(load(earlier / "config.yaml", [f"output_dir={earlier}", "updates=3"]), resume=True, quiet=True)
    third, expected = rows(earlier / "metrics.jsonl")[-1], json.loads((earlier / "third_update.json").read_text())
    kept = {name: value for name, value in expected.items() if not name.startswith(OF_TIMES)}
    for agent in ("ann", "bob"):  # these have no critic, which is not measured any longer
        assert kept.pop(f"{agent}/val/explained_variance") == 0.0
    assert {name: third.get(name) for name in kept} == pytest.approx(kept, rel=1e-4, abs=1e-6, nan_ok=True)
