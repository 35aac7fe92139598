"""Reading a run folder for people: whatever is there, of a run that goes on, has ended, or was cut off."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from maporl.records import whole_lines

RECORDS = ("metrics.jsonl", "dialogues.jsonl")


class RunError(RuntimeError):
    """The folder is no run, or one that cannot be read; names the file and the line."""


@dataclass
class Run:
    """A run folder's records. ``dialogues`` are (when, record): the update, or ``before`` and ``after`` of the evaluations."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    dialogues: list[tuple[int | str, dict[str, Any]]] = field(default_factory=list)
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    finished: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def updates(self) -> list[dict[str, Any]]:
        """The records of training, without those of evaluations."""
        return [m for m in self.metrics if any(key.startswith("time/") for key in m)]


def read_run(folder: str | Path) -> Run:
    """The run in ``folder``; raises :class:`RunError` where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; give the output_dir of a run")
    if not any((folder / name).exists() for name in ("config.yaml", *RECORDS)):
        found = sorted(path.name for path in folder.iterdir())[:5]
        what = f"holds {', '.join(found)}" if found else "is empty"
        raise RunError(f"{folder}: is no run: it has neither config.yaml nor {' nor '.join(RECORDS)}, and {what}; give the output_dir of a run")  # fmt: skip
    run = Run(folder, finished=(folder / "final").is_dir())
    if (folder / "config.yaml").exists():
        run.config = _yaml(folder / "config.yaml")
    run.metrics = list(_records(folder / "metrics.jsonl", ("step",)))
    needed = ("example", "utterances")
    for when in ("before", "after"):
        setattr(run, when, _evaluation(folder / f"evaluation_{when}.json"))
        run.dialogues += [(when, record) for record in _records(folder / f"evaluation_{when}.jsonl", needed)]
    run.dialogues += [(record["step"], record) for record in _records(folder / "dialogues.jsonl", ("step", *needed))]
    return run


def _records(file: Path, needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    try:
        for number, record in enumerate(whole_lines(file), 1):
            missing = [key for key in needed if not isinstance(record, dict) or key not in record]
            if missing:
                raise RunError(
                    f"{file}: line {number} has no {missing[0]!r}; it was not written by this version of maporl"
                )
            yield record
    except ValueError as error:  # names file and line
        raise RunError(str(error)) from None


def _yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    return content if isinstance(content, dict) else {}


def _evaluation(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file}: cannot be read: {error}") from None
    if not isinstance(content, dict) or not {"turns", "flips"} <= content.keys():
        raise RunError(f"{file}: has no 'turns' and 'flips'; it was not written by this version of maporl")
    return content
