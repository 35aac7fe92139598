"""Two trained runs, and cross-play between them."""

import pytest
from tiny_run import TINY
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.runs.train import train
from maporl.studies.crossplay.result import CrossPlay, CrossTeam
from maporl.validation.load import from_dict


def played(results, runs=("one", "two"), seats=("ann", "bob"), **more):
    return CrossPlay(runs, seats, tuple(CrossTeam(team, right) for team, right in results.items()), **more)


TWO = {
    (0, 0): (1.0, 1.0, 1.0, 0.5),
    (0, 1): (0.5, 0.0, 1.0, 0.5),
    (1, 0): (0.5, 0.0, 1.0, 0.0),
    (1, 1): (1.0, 0.0, 1.0, 1.0),
}
SPLIT = {"name": "toy_sum", "largest": 4, "held_out": 0.5, "seed": 0}


def trained(folder, seed, **changes):
    """A finished run, whose warm start is long enough that the teams differ in what they get right."""
    warm = {"steps": 60, "batch_size": 16, "learning_rate": 5e-3, "wrong": 0.0}
    values = {**TINY, "output_dir": str(folder), "seed": seed, "updates": 1, "task": SPLIT, "warm_start": warm}
    train(from_dict({**values, "evaluation": {"questions": 12}} | changes), resume=False, quiet=True)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Three runs of one split, whose seeds differ. Tests must not change them."""
    root = tmp_path_factory.mktemp("cross")
    return [trained(root / f"seed{seed}", seed) for seed in (1, 2, 3)]


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])
