"""Reading a run folder for people: whatever is there, of a run that goes on, has ended, or was cut off."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from maporl.errors import RunError
from maporl.storage.jsonl import DamagedRecord, whole_lines

RECORDS = ("metrics.jsonl", "dialogues.jsonl")
HELD_OUT = ("before", "after")
UNUSED = ("prompt_ids", "response_ids", "logprobs")
"""Of an utterance; they are most of a file, and no person reads them."""

When = int | str
"""Of a dialogue: the update, or ``before`` and ``after`` for the evaluations."""


@dataclass
class Run:
    """A run folder's records. ``dialogues`` are (when, record). ``recorded`` counts those that were read and are not kept, too."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    dialogues: list[tuple[When, dict[str, Any]]] = field(default_factory=list)
    recorded: int = 0
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    finished: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def updates(self) -> list[dict[str, Any]]:
        """The records of training, without those of evaluations."""
        return [m for m in self.metrics if any(key.startswith("time/") for key in m)]

    def of(self, when: str) -> list[dict[str, Any]]:
        """The dialogues of an evaluation."""
        return [record for w, record in self.dialogues if w == when]

    def agents(self) -> dict[str, dict[str, Any]]:
        """The agents' sections."""
        return self.config.get("agents") or {}

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration, empty where there is none."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def read_run(folder: str | Path) -> Run:
    """The run in ``folder``; raises :class:`RunError` where there is none."""
    return RunReader(folder).read()


class RunReader:
    """Reads a run again and again while it grows, each time only what is new. ``keep``: of the dialogues of training, how many of
    the newest are kept.

    ``arrived`` has every dialogue that is kept as (number, when, record), numbered as they were read, and named by its record's
    ``key``; ``epoch`` counts how often the run was found to have been set back, when everything is read and numbered anew.
    """

    def __init__(self, folder: str | Path, keep: int | None = None):
        self.folder, self.keep = Path(folder), keep
        self.epoch = 0
        self._begin()

    def _begin(self) -> None:
        self.arrived: list[tuple[int, When, dict[str, Any]]] = []
        self._number = 0
        self._named: Counter[str] = Counter()
        self._metrics: list[dict[str, Any]] = []
        self._held_out: dict[str, dict[str, Any]] = {}
        self._read: dict[str, tuple[int, int]] = {}  # by file: its inode, and the byte that was read to

    def read(self) -> Run:
        """The run as it is now."""
        _must_be_run(self.folder)
        if any(self._set_back(name) for name in self._read):
            self.epoch += 1
            self._begin()
        config = _yaml(self.folder / "config.yaml")
        for record in self._new("metrics.jsonl"):
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise self._older("metrics.jsonl", "'step'")
            self._metrics.append(record)
        for when in HELD_OUT:
            report = _evaluation(self.folder / f"evaluation_{when}.json")
            if report is not None:  # it is written after the dialogues that it counts
                self._held_out[when] = report
                self._take(f"evaluation_{when}.jsonl", when)
        self._take("dialogues.jsonl", None)
        return Run(
            self.folder,
            config,
            list(self._metrics),
            [(when, record) for _, when, record in self.arrived],
            self._number,
            self._held_out.get("before"),
            self._held_out.get("after"),
            (self.folder / "final").is_dir(),
        )

    def _take(self, name: str, when: str | None) -> None:
        for record in self._new(name):
            missing = _missing(record, when)
            if missing:
                raise self._older(name, missing)
            for u in record["utterances"]:
                for key in UNUSED:
                    u.pop(key, None)
            one = when or record["step"]
            name = f"{one}/{record['example'].get('id')}"
            self._named[name] += 1
            record["key"] = name if self._named[name] == 1 else f"{name}/{self._named[name]}"
            self.arrived.append((self._number, one, record))
            self._number += 1
        if self.keep is not None:
            trained = [one for one in self.arrived if isinstance(one[1], int)]
            gone = {number for number, _, _ in trained[: max(0, len(trained) - self.keep)]}
            self.arrived = [one for one in self.arrived if one[0] not in gone]

    def _new(self, name: str) -> list[Any]:
        """The records of a file that were not there the last time."""
        file = self.folder / name
        if not file.exists():
            return []
        _, start = self._read.get(name, (0, 0))
        found = []
        try:
            for end, record in whole_lines(file, start):
                found.append(record)
                start = end
        except DamagedRecord as error:
            raise RunError(str(error)) from None
        self._read[name] = (file.stat().st_ino, start)
        return found

    def _set_back(self, name: str) -> bool:
        """Whether what was read of a file is not its beginning any more: a run was resumed from an earlier checkpoint."""
        inode, end = self._read[name]
        file = self.folder / name
        return not file.exists() or file.stat().st_ino != inode or file.stat().st_size < end

    def _older(self, name: str, what: str) -> RunError:
        return RunError(f"{self.folder / name}: a record has no {what}; it was not written by this version of maporl")


def _must_be_run(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(
            f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; give the output_dir of a run"
        )
    if not any((folder / name).exists() for name in ("config.yaml", *RECORDS)):
        found = sorted(path.name for path in folder.iterdir())[:5]
        what = f"holds {', '.join(found)}" if found else "is empty"
        raise RunError(f"{folder}: is no run: it has neither config.yaml nor {' nor '.join(RECORDS)}, and {what}; give the output_dir of a run")  # fmt: skip


def _missing(record: Any, when: str | None) -> str:
    """What a dialogue's record lacks to be one; empty where nothing."""
    if not isinstance(record, dict) or not isinstance(record.get("example"), dict):
        return "'example'"
    if when is None and not isinstance(record.get("step"), int):
        return "'step'"
    utterances = record.get("utterances")
    if not isinstance(utterances, list) or not all(isinstance(u, dict) for u in utterances):
        return "'utterances'"
    for u in utterances:
        if not isinstance(u.get("agent"), str) or not isinstance(u.get("turn"), int):
            return "'agent' and 'turn' in its utterances"
        if u.get("grade") is not None and not (
            isinstance(u["grade"], dict) and {"answer", "correct"} <= u["grade"].keys()
        ):
            return "'answer' and 'correct' in its grades"
    return ""


def _yaml(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    content = content if isinstance(content, dict) else {}
    agents = content.get("agents")
    if agents is not None and not (
        isinstance(agents, dict) and all(isinstance(a, dict | None) for a in agents.values())
    ):
        raise RunError(f"{file}: agents: expected a mapping of names to sections, got {agents!s:.60}")
    if agents is not None:
        content["agents"] = {str(name): section or {} for name, section in agents.items()}
    return content


def _evaluation(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file}: cannot be read: {error}") from None
    if not isinstance(content, dict) or not content.get("turns") or "flips" not in content:
        raise RunError(f"{file}: has no 'turns' and 'flips'; it was not written by this version of maporl")
    return content
