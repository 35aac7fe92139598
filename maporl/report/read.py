"""Reads a run folder for people. The run may still be going on, or it may have ended or been cut off."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from maporl.errors import RunError
from maporl.evaluation.metrics import Evaluation
from maporl.report.files import is_there, read_config, read_crossplay, read_evaluation, read_lines, unlike
from maporl.storage.run_folder import LEARNS_FROM, has_final
from maporl.types import Dialogue, Stop, from_record
from trl_ext.errors import retold
from trl_ext.files.jsonl import DamagedRecord, whole_lines

RECORDS = ("metrics.jsonl", "dialogues.jsonl")
HELD_OUT = ("before", "after")
CROSSPLAY = "crossplay.json"
"""The result of ``maporl crossplay``, which it writes into the folder of every run that took part."""
MOST_STEPS, MOST_TURNS = 2**53, 100_000
"""The largest update and the largest turn that a page shows.

Larger numbers are damage, and would be counted through.
"""
UNUSED = ("prompt_ids", "response_ids", "logprobs")
"""Fields of an utterance that no person reads. They are most of a file, so they are dropped line by line."""

When = int | str
"""When a dialogue was played: the number of the update, or ``before`` or ``after`` for the evaluations."""

Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False)
class Recorded:
    """A dialogue as a run has recorded it. ``number`` counts the dialogues in the order of reading; ``key`` names this
    one, and is the same whenever the run is read.
    """

    number: int
    when: When
    key: str
    dialogue: Dialogue


@dataclass
class Run:
    """The records of a run folder. ``dialogues`` are those that are kept; ``recorded`` counts all that were read.
    ``crossplay`` is the latest :class:`maporl.CrossPlay` that the run took part in. ``learns_from`` says what the team
    learns from, as the run recorded it. ``damaged`` names in sentences what could not be read of the records: it is
    left out of all the rest. ``kept`` is for what is made of the run once.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    dialogues: list[Recorded] = field(default_factory=list)
    recorded: int = 0
    before: Evaluation | None = None
    after: Evaluation | None = None
    finished: bool = False
    crossplay: Any = None
    learns_from: tuple[str, ...] = ()
    damaged: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name

    def updates(self) -> list[dict[str, Any]]:
        """The metrics of training, in updates or in rounds, without those of evaluations."""
        return [m for m in self.metrics if "episode" in m or any(key.startswith("time/") for key in m)]

    def of(self, when: str) -> list[Recorded]:
        """The dialogues of the evaluation ``before`` or ``after`` training."""
        return [one for one in self.dialogues if one.when == when]

    def agents(self) -> dict[str, dict[str, Any]]:
        """The agents' sections of the configuration."""
        return self.config.get("agents") or {}

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration; empty where the configuration lacks it."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


def read_run(folder: str | Path) -> Run:
    """The run in ``folder``.

    Raises:
        RunError: the folder is not a run, or a file in it cannot be read.
    """
    return RunReader(folder).read()


class RunReader:
    """Reads a run again and again while it grows, each time only what is new.

    ``keep`` bounds how many dialogues of training are kept: the newest. ``epoch`` counts how often the run was set back
    to an earlier checkpoint; everything is then read and numbered again.
    """

    def __init__(self, folder: str | Path, keep: int | None = None):
        self.folder, self.keep = Path(folder), keep
        self.epoch = 0
        self._begin()

    def _begin(self) -> None:
        self._dialogues: list[Recorded] = []
        self._number = 0
        self._named: Counter[str] = Counter()
        self._metrics: list[dict[str, Any]] = []
        self._held_out: dict[str, Evaluation] = {}
        self._read: dict[str, tuple[int, int]] = {}  # by file: its inode, and the byte up to which it was read
        self._damaged: dict[str, list[str]] = {}  # by file: why records of it were left out

    def read(self) -> Run:
        """The run as it is now.

        Raises:
            RunError: the folder is not a run, or a file in it cannot be read.
        """
        _must_be_run(self.folder)
        if any(self._set_back(name) for name in self._read):
            self.epoch += 1
            self._begin()
        config = read_config(self.folder / "config.yaml")
        self._metrics += self._new("metrics.jsonl", self._numbers)
        for when in HELD_OUT:
            report = self._whole(read_evaluation, f"evaluation_{when}.json")
            if report is not None:  # it is written after the dialogues that it counts
                self._held_out[when] = report
                self._take(f"evaluation_{when}.jsonl", when)
        self._take("dialogues.jsonl", None)
        return Run(
            self.folder,
            config,
            list(self._metrics),
            list(self._dialogues),
            self._number,
            self._held_out.get("before"),
            self._held_out.get("after"),
            has_final(self.folder),
            self._whole(read_crossplay, CROSSPLAY),
            tuple(read_lines(self.folder / LEARNS_FROM)),
            [_left_out(self.folder / name, faults) for name, faults in self._damaged.items() if faults],
        )

    def _whole(self, read: Callable[[Path], Kept], name: str) -> Kept | None:
        """What ``read`` reads of a file, or None if the file is damaged."""
        self._damaged[name] = []  # the file is always read from its beginning
        try:
            return read(self.folder / name)
        except DamagedRecord as error:
            self._damaged[name] = [str(error)]
            return None

    def _numbers(self, record: Any) -> dict[str, Any]:
        if not isinstance(record, dict) or not _counts(record.get("step"), MOST_STEPS):
            raise _older(self.folder / "metrics.jsonl", "'step'")
        return record

    def _take(self, name: str, when: str | None) -> None:
        def played(record: Any) -> tuple[When, Dialogue]:
            if missing := _missing(record, when):
                raise _older(self.folder / name, missing)
            with unlike(f"{self.folder / name}: a record is not a dialogue"):
                return when or record["step"], _dialogue(record)

        for one, dialogue in self._new(name, played):
            key = f"{one}/{dialogue.example.id}"
            self._named[key] += 1
            unique = key if self._named[key] == 1 else f"{key}/{self._named[key]}"
            self._dialogues.append(Recorded(self._number, one, unique, dialogue))
            self._number += 1
        if self.keep is not None:
            trained = [one for one in self._dialogues if isinstance(one.when, int)]
            gone = set(trained[: max(0, len(trained) - self.keep)])
            self._dialogues = [one for one in self._dialogues if one not in gone]

    def _new(self, name: str, parse: Callable[[Any], Kept]) -> list[Kept]:
        """What ``parse`` makes of each record of a file that was not there the last time."""
        file = self.folder / name
        if not is_there(file):
            return []
        _, start = self._read.get(name, (0, 0))
        records: list[Kept] = []
        faults, ends = self._damaged.setdefault(name, []), [start]

        def damaged(end: int, fault: DamagedRecord) -> None:
            ends.append(end)
            faults.append(str(fault))

        with retold(OSError, lambda error: RunError(f"{file}: cannot be read: {error.strerror}")):
            for end, record in whole_lines(file, start, damaged):
                try:
                    records.append(parse(record))
                    ends.append(end)
                except DamagedRecord as fault:
                    damaged(end, fault)
            self._read[name] = (file.stat().st_ino, ends[-1])
        return records

    def _set_back(self, name: str) -> bool:
        """Whether a file no longer begins with what was read of it: the run was resumed from an earlier checkpoint."""
        inode, end = self._read[name]
        file = self.folder / name
        return not file.exists() or file.stat().st_ino != inode or file.stat().st_size < end


def _older(file: Path, what: str) -> DamagedRecord:
    return DamagedRecord(f"{file}: a record has no {what}; it was not written by this version of maporl")


def _left_out(file: Path, faults: list[str]) -> str:
    """What of a file is left out, in a sentence."""
    if len(faults) == 1:
        return f"{faults[0]}. It is left out."
    return f"{file}: {len(faults)} records cannot be read, and are left out. The first: {faults[0]}"


def _must_be_run(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; give a run's output_dir")
    if not any((folder / name).exists() for name in ("config.yaml", *RECORDS)):
        names = sorted(path.name for path in folder.iterdir())[:5]
        what = f"holds {', '.join(names)}" if names else "is empty"
        raise RunError(f"{folder}: is not a run: it has neither config.yaml nor {' nor '.join(RECORDS)}, and {what}; give the output_dir of a run")  # fmt: skip  # noqa: E501


def _counts(number: Any, most: int) -> bool:
    """Return whether ``number`` is a whole number from 0 to ``most``."""
    return isinstance(number, int) and 0 <= number <= most


def _missing(record: Any, when: str | None) -> str:
    """The part that a dialogue's record lacks; empty where it has all of them."""
    if not isinstance(record, dict) or not isinstance(record.get("example"), dict):
        return "'example'"
    if when is None and not _counts(record.get("step"), MOST_STEPS):
        return "'step'"
    utterances = record.get("utterances")
    if not isinstance(utterances, list) or not all(isinstance(u, dict) for u in utterances):
        return "'utterances'"
    for u in utterances:
        if not isinstance(u.get("agent"), str) or not _counts(u.get("turn"), MOST_TURNS):
            return "'agent' and 'turn' in its utterances"
        if u.get("grade") is not None and not (
            isinstance(u["grade"], dict) and {"answer", "correct"} <= u["grade"].keys()
        ):
            return "'answer' and 'correct' in its grades"
    return ""


def _dialogue(record: dict[str, Any]) -> Dialogue:
    """The dialogue of a record that has all parts (:func:`_missing`)."""
    # the file may be edited or old, so a field that is absent or of the wrong kind is empty, and a number may be a text
    example = {"id": "", "question": "", "answer": "", **_cleaned(record["example"])}
    example["id"] = str(example["id"])
    utterances = [
        {
            "policy": "",
            "order": u["turn"],
            "messages": [],
            "text": "",
            **_cleaned(u),
            "id": u["id"] if isinstance(u.get("id"), int) else number,
        }
        for number, u in enumerate(record["utterances"])
    ]
    return from_record({**record, "example": example, "utterances": utterances})


_KINDS = {
    **dict.fromkeys(("question", "answer", "policy", "text", "role", "restated", "submitted"), str),
    **dict.fromkeys(("meta", "rewards", "tags", "trace"), dict),
    **dict.fromkeys(("messages", "parents", "schemas"), list),
    **dict.fromkeys(("order", "caller", "after"), int),
}
_STOPS = [stop.value for stop in Stop]


def _cleaned(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of an example or an utterance that are of the right kind, without the :data:`UNUSED` ones."""
    fields = {}
    for name, value in entry.items():
        if value is None or name in UNUSED:
            continue
        kind = _KINDS.get(name)
        if kind is None or isinstance(value, kind):
            fields[name] = value
        elif kind is str:
            fields[name] = str(value)
    if fields.get("stop") not in _STOPS:
        fields.pop("stop", None)
    if "parents" in fields:
        fields["parents"] = [parent for parent in fields["parents"] if isinstance(parent, int)]
    if "messages" in fields:
        fields["messages"] = [message for message in fields["messages"] if isinstance(message, dict)]
    if "grade" in fields:
        answer, correct = fields["grade"]["answer"], fields["grade"]["correct"]
        fields["grade"] = {
            "reason": "",
            **fields["grade"],
            "answer": None if answer is None else str(answer),
            "correct": None if correct is None else bool(correct),
        }
    if "trace" in fields and not _is_trace(fields["trace"]):
        del fields["trace"]
    return fields


def _is_trace(entry: dict[str, Any]) -> bool:
    lists = [entry.get(name) for name in ("pieces", "logprobs", "advantages")]
    whole = all(isinstance(each, list) for each in lists) and isinstance(entry.get("values"), list | None)
    return whole and _is_comparison(entry.get("compared"))


def _is_comparison(entry: Any) -> bool:
    """Whether it is what :attr:`maporl.types.Trace.compared` may be."""
    if entry is None:
        return True
    return (
        isinstance(entry, dict)
        and entry.get("by") in ("baseline", "scale")
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("key"), dict)
        and all(_counts(entry.get(name), MOST_STEPS) for name in ("utterances", "questions"))
        and isinstance(entry.get("credit"), int | float)
    )
