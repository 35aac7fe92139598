"""Every recipe trains on the same rows in one process, in two and in four: it forks alike, pays alike and compares
alike."""

import json
import os

import processes
import pytest
from folders import ROOT, SUPPORT
from launches import ranks_of

from maporl.config.recipes import recipe_files
from maporl.validation.load import load

QUESTIONS = 8
"""The questions of a batch over all processes."""
RECIPES = [name for name in sorted(recipe_files()) if not load(name).loop.stages]


def launched(folder, number, recipes):
    """What each recipe is trained on in ``number`` processes: its rows, by their places in the run."""
    folder.mkdir()
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    worker = [str(SUPPORT / "recipe_runs.py"), str(folder), str(QUESTIONS), *recipes]
    if number == 1:
        done = processes.run(worker, os.environ | path, timeout=3600)
    else:
        done = processes.end_of(ranks_of(worker, number, path), 3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return {
        name: sorted(row for rank in range(number) for row in json.loads((folder / f"{name}.{rank}.json").read_text()))
        for name in recipes
    }


def compared(one, other):
    """Compare the rows of a recipe in two runs. Returns how many there are."""
    assert [row[:6] for row in one] == [row[:6] for row in other]  # the same words in the same places
    for row, again in zip(one, other, strict=True):
        assert row[6:] == pytest.approx(again[6:], abs=1e-4), (row, again)  # credit, advantage, weight
    return len(one)


@pytest.mark.slow
def test_every_recipe_trains_on_the_same_rows_in_one_two_and_four_processes(tmp_path):
    alone, two, four = (launched(tmp_path / str(number), number, RECIPES) for number in (1, 2, 4))
    differ = {}
    for name in RECIPES:
        try:
            assert compared(alone[name], two[name]) == compared(alone[name], four[name]) > 0, "no rows"
        except AssertionError as e:
            differ[name] = str(e)[:300]
    assert len(RECIPES) > 50
    assert differ == {}


def test_a_recipe_of_each_branching_trains_on_the_same_rows_in_one_process_and_in_two(tmp_path):
    recipes = ["mhgpo", "sdrl", "mars2"]
    alone, two = (launched(tmp_path / str(number), number, recipes) for number in (1, 2))
    assert all(compared(alone[name], two[name]) > 0 for name in recipes)
