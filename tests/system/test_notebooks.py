"""Every notebook runs from top to bottom, and is stored with the outputs of the code that it has."""

import ast
import importlib.util
import json
import re
import subprocess

import processes
import pytest
from folders import ROOT

from maporl.advantages import BASELINES
from maporl.rewards.rules import RULES

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_cells(file):
    return [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_a_notebook_runs(file, monkeypatch):
    """Its cells are plain Python, run one after the other; a command in one is a process with the libraries loaded."""
    monkeypatch.setenv("UPDATES", "2")
    monkeypatch.setenv("WARM_START", "5")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(subprocess, "run", lambda words, **options: processes.run(words[1:]))
    known = [(registry, dict(registry)) for registry in (RULES, BASELINES)]
    names = {"__name__": "notebook"}
    try:
        for number, cell in enumerate(code_cells(file), 1):
            exec(compile("".join(cell["source"]), f"{file.name}, code cell {number}", "exec"), names)
    finally:
        for registry, before in known:  # a notebook that adds parts leaves none behind
            registry.clear()
            registry.update(before)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_a_notebook_is_stored_with_the_outputs_of_its_code(file):
    spec = importlib.util.spec_from_file_location("make_notebooks", EXAMPLES / "make_notebooks.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert notebook["metadata"]["run"] == program.fingerprint(notebook), "its code changed since it ran: make notebooks"


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_the_outputs_of_a_notebook_are_complete_small_and_of_no_machine(file):
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in outputs)
    shown = json.dumps(outputs)
    assert len(shown) < 60_000 and "\\r" not in shown and "\\u001b" not in shown
    assert not re.search(r"/tmp/(?!run)|/home|/work|/root|/Users|site-packages", shown)


def test_a_script_with_a_notebook_has_the_same_code():
    pairs = [(script, script.with_suffix(".ipynb")) for script in EXAMPLES.glob("*.py")]
    pairs = [(script, notebook) for script, notebook in pairs if notebook.is_file()]
    assert pairs
    for script, notebook in pairs:
        there = [ast.dump(node) for cell in code_cells(notebook) for node in ast.parse("".join(cell["source"])).body]
        here = [ast.dump(node) for node in ast.parse(script.read_text(encoding="utf-8")).body[1:]]
        assert here == there[: len(here)], f"{script.name} and {notebook.name} differ"
