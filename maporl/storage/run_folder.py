"""The run folder: ``config.yaml``, ``metrics.jsonl``, ``dialogues.jsonl``. Nothing of an earlier run is overwritten."""

import json
from collections.abc import Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from maporl.errors import UserError
from maporl.types import Dialogue, to_record
from trl_ext.errors import retold
from trl_ext.files.jsonl import whole_lines
from trl_ext.files.lock import holds_something
from trl_ext.files.manifest import DATA
from trl_ext.files.paths import UnsafeName, within
from trl_ext.files.set_aside import ABANDONED, set_aside, set_records_aside
from trl_ext.process import distributed

INITIAL, TOKENIZERS, FINAL = "initial", "tokenizers", "final"
"""A run's folders of weights: those with which it began, tokenizers of policies that have no weights there, and its
end's."""
LEARNS_FROM = "learns_from.txt"
"""What a run learns from, in a sentence for each part (:mod:`maporl.training.learns_from`)."""
EVALUATED = ("evaluation_after.json", "evaluation_after.jsonl")
RESULTS = (FINAL, *EVALUATED, "crossplay.json")
"""What the end of a run leaves besides reports, which are written again."""
TAGS = ["maporl", "trl", "ppo", "multi-agent", "reinforcement-learning"]
"""The tags of the model cards in a run's folder."""


class RunExists(UserError, RuntimeError):
    """The output folder holds another run."""


def has_final(folder: Path) -> bool:
    """Return whether ``folder`` has the weights of a run's end: a folder ``final`` with files in it. Links do not
    count.

    An empty one, which a person or a broken copy has left, would pass for weights that are nowhere. Hidden files, which
    file managers leave, do not count.
    """
    final = folder / FINAL
    if not final.is_dir() or final.is_symlink():
        return False
    files = (path for path in final.rglob("*") if not path.name.startswith("."))
    return any(path.is_file() and not path.is_symlink() for path in files)


def weights_of(folder: Path) -> Path:
    """Return the folder with the policies' folders: ``final`` in a run, and ``folder`` itself in a pushed team."""
    return folder / FINAL if has_final(folder) else folder


def must_be_empty(folder: Path) -> None:
    """Check that an output ``folder`` is missing or empty. What a process left that was killed does not count.

    Raises:
        RunExists: it holds something.
    """
    if holds_something(folder):
        raise RunExists(f"{folder}: exists and is not empty; nothing was overwritten. Choose another folder (--output)")


def own_places(section: Mapping[str, Any], output_dir: str, folder: Path) -> dict[str, str]:
    """Return the places in an agent's ``section`` that lie in the team's own ``folder``, as they are now.

    They begin with ``output_dir``, which was the folder when the configuration was written, or with ``./`` in a team
    that was pushed.
    """
    places = {}
    for key in ("model", "tokenizer", "adapter"):
        value = section.get(key)
        for start in (f"{output_dir}/", "./"):
            if isinstance(value, str) and value.startswith(start):
                try:
                    place = within(folder, value.removeprefix(start))
                except UnsafeName:  # it leads elsewhere, so it is not one of the folder's own places
                    continue
                if place.is_dir():
                    places[key] = str(place)
    return places


def where_it_lies(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the plain ``values`` of the ``config.yaml`` in ``folder`` with that folder as ``output_dir``, if a run has
    written it. The run's own places are then those in the folder, wherever it has been moved.
    """
    agents = values.get("agents")
    if not (folder / DATA).is_file() or not isinstance(agents, dict):
        return values
    for section in agents.values():
        if isinstance(section, dict):
            section |= own_places(section, str(values.get("output_dir")), folder)
    return values | {"output_dir": str(folder)}


class RunFolder:
    """Appends records to the files of a run folder. Only the main process writes.

    A crash may cut off the last line of a file. :meth:`rewind` removes it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.dialogues = self.path / "dialogues.jsonl"
        self._checked = False

    def must_be_new(self) -> None:
        """Check that the folder holds no records of another run.

        Raises:
            RunExists: it holds records that this run did not write.
        """
        if not self._checked and distributed.is_main() and (self.metrics.exists() or self.dialogues.exists()):
            raise RunExists(f"{self.path}: holds another run; --resume goes on with it, or choose another output_dir")
        self._checked = True

    def add_metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append a line of metrics. The first call checks that the folder holds no other run.

        Raises:
            RunExists: it holds another run's records.
        """
        if not self._checked:
            self.must_be_new()
        self._append(self.metrics, [json.dumps({"step": step, **values})])

    def add_dialogues(self, step: int, dialogues: list[Dialogue]) -> None:
        """Append one line for each dialogue.

        Raises:
            RunExists: the folder holds another run's records.
        """
        if not self._checked:
            self.must_be_new()
        self._append(self.dialogues, [json.dumps({"step": step, **to_record(d)}) for d in dialogues])

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records of all complete lines of ``metrics.jsonl``."""
        return [record for _, record in whole_lines(self.metrics)]

    def read_dialogues(self) -> list[dict[str, Any]]:
        """Return the records of all complete lines of ``dialogues.jsonl``, or an empty list if the file is missing."""
        return [record for _, record in whole_lines(self.dialogues)] if self.dialogues.exists() else []

    @property
    def records(self) -> list[Path]:
        """The files with records of updates, whether they exist or not."""
        return [self.metrics, self.dialogues]

    def go_on(self) -> None:
        """Take the records in the folder for this run's own, because it resumes."""
        self._checked = True

    def rewind(self, step: int) -> None:
        """Go on after ``step``. Later records move to ``metrics.jsonl.abandoned`` and ``dialogues.jsonl.abandoned``.

        Raises:
            DamagedRecord: a line that is not the last one is damaged.
        """
        self.go_on()
        for path in self.records:
            if path.exists() and distributed.is_main():
                set_records_aside(path, step)

    def set_results_aside(self) -> list[Path]:
        """Rename the :data:`RESULTS` in the folder, because the run trains on, and return their new paths."""
        return [set_aside(self.path / name, ABANDONED) for name in RESULTS if lexists(self.path / name)]

    def _append(self, path: Path, lines: list[str]) -> None:
        if not distributed.is_main():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        # the error of a write does not name the file
        named = retold(OSError, lambda error: OSError(error.errno, error.strerror, str(path)), cause=True)
        with named, path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
