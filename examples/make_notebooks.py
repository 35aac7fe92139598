"""Runs the notebooks of this folder and stores them with their outputs: ``python examples/make_notebooks.py [NAME
...]``.

Each notebook runs in a kernel of its own, on one thread. What would differ from run to run or from machine to machine
is left out: progress bars and warnings, folders, and times. A test compares what was run with what is stored.
"""

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "100",
    "NO_COLOR": "1",
}
LOGGED = re.compile(r"^(\[\d{4}-\d\d-\d\d |\{'(loss|train_runtime)': ).*\n", re.MULTILINE)
"""A line with the time in front, and the losses of a step, as libraries log them."""
CURSOR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
"""What moves a terminal's cursor or colours its text."""


def fingerprint(notebook: dict) -> str:
    """Return a digest of a notebook's code, which says whether its outputs are of this code."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def cleaned(output: dict, temporary: str) -> dict | None:
    """Return an output as it is stored, or None if it is left out. ``temporary`` is the folder of temporary files."""
    if output["output_type"] == "stream":
        if output["name"] != "stdout":
            return None
        text = LOGGED.sub("", CURSOR.sub("", output["text"]).replace("\r\n", "\n"))
        lines = [line.rpartition("\r")[2] for line in text.split("\n")]
        output["text"] = hidden("\n".join(line.rstrip() for line in lines), temporary)
        return output if output["text"].strip() else None
    data = output.get("data", {})
    if "<progress" in "".join(data.get("text/html", "")):
        return None
    for kind in [kind for kind in data if kind.startswith("text/")]:
        data[kind] = hidden(data[kind], temporary)
    return output


def hidden(text: str, temporary: str) -> str:
    """Return ``text`` with this machine's folders replaced: temporary ones, and that of the checkout."""
    text = re.sub(re.escape(temporary) + r"/tmp\w+", "/tmp/run", text)
    return text.replace(str(FOLDER.parent), "maporl")


def run(file: Path) -> None:
    """Run a notebook, and store it with its outputs."""
    import nbformat  # these two come with the extra "notebooks"; the fingerprint needs neither
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, **SETTINGS, "TMPDIR": temporary}
        NotebookClient(
            notebook, timeout=1800, coalesce_streams=True, resources={"metadata": {"path": str(FOLDER)}}
        ).execute(env=environment)
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            kept = (cleaned(output, temporary) for output in cell.outputs)
            cell.outputs = [output for output in kept if output is not None]
            cell.metadata = {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "run": fingerprint(notebook),
    }
    nbformat.write(notebook, file)
    print(f"{file.name}: {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        run(FOLDER / name)
