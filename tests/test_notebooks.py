"""Every notebook runs from top to bottom, and is stored without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda f: f.stem)
def test_a_notebook_runs_and_is_stored_without_outputs(file, monkeypatch):
    notebook = nbformat.read(file, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)
    monkeypatch.setenv("UPDATES", "2")
    monkeypatch.setenv("WARM_START", "5")
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "examples")}}
    )
    client.execute()
