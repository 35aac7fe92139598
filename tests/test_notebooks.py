"""Every notebook runs from top to bottom, and is stored without outputs."""

import json
import subprocess

import processes
import pytest

from maporl.advantages import BASELINES
from maporl.rewards.rules import RULES


@pytest.mark.parametrize("file", sorted(processes.ROOT.glob("examples/*.ipynb")), ids=lambda f: f.stem)
def test_a_notebook_runs_and_is_stored_without_outputs(file, monkeypatch):
    """Its cells are plain Python, run one after the other; a command in one is a process with the libraries loaded."""
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    monkeypatch.setenv("UPDATES", "2")
    monkeypatch.setenv("WARM_START", "5")
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(subprocess, "run", lambda words, **options: processes.run(words[1:]))
    monkeypatch.setitem(RULES, "best", None)  # a notebook that adds parts leaves none behind
    monkeypatch.setitem(BASELINES, "median", None)
    names = {"__name__": "notebook"}
    for number, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"{file.name}, code cell {number}", "exec"), names)
