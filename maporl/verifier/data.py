"""The data of a verifier: labelled answers to questions, one JSON object a line. Imports no torch."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maporl.errors import UserError
from maporl.storage.run_folder import RunExists
from maporl.tasks.base import read_rows
from maporl.types import Message
from maporl.verifier.encoding import chat_of
from trl_ext.files.atomic import replace_file

MANIFEST = "manifest.json"
"""The file beside the samples of ``maporl verifier generate``: what made them, and how many there are."""


class DataError(UserError, ValueError):
    """Data from which no verifier can be made."""


@dataclass(frozen=True)
class Sample:
    """One labelled answer.

    ``question`` is the text that was put to the agent, because the verifier will read that text too. ``source`` is
    "sample" for an answer of a policy, "reference" for the task's own solution, and "hint" for an answer of a policy
    that was given a hint. ``position`` numbers the samples of ``maporl verifier generate``.
    """

    id: str
    question: str
    answer: str
    correct: bool
    temperature: float | None = None
    policy: str | None = None
    position: int | None = None
    source: str = "sample"

    def chat(self) -> list[Message]:
        """The chat that the verifier reads."""
        return chat_of(self.question, self.answer)

    def line(self) -> str:
        """The sample as one line of JSON, from which :func:`read_samples` reads an equal sample."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_samples(files: Iterable[Path]) -> list[Sample]:
    """The samples in JSONL files, in order.

    Raises:
        DataError: a file does not exist, or a row is not a sample; names the file and the row.
        TaskError: a line is not JSON.
    """
    samples = []
    for file in files:
        if file.suffix not in (".jsonl", ".json") or not file.is_file():
            raise DataError(f"{file}: no such file; expected a .jsonl file of samples")
        samples += [_sample(row, f"{file}: row {n}") for n, row in enumerate(read_rows(str(file), "train"), 1)]
    return samples


def _sample(row: dict[str, Any], where: str) -> Sample:
    for key, kind, name in (("id", str, "text"), ("question", str, "text"), ("answer", str, "text"),
                            ("correct", bool, "true or false")):  # fmt: skip
        if not isinstance(row.get(key), kind):
            raise DataError(f"{where}: {key}: expected {name}, got {row.get(key)!r:.60}; correct the row or remove it")
    unknown = sorted(row.keys() - Sample.__dataclass_fields__.keys())
    if unknown:
        raise DataError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(Sample.__dataclass_fields__)}")
    return Sample(**row)


def read_folder(folder: Path) -> list[Sample]:
    """The samples of a finished ``maporl verifier generate``, or of any folder of ``samples-*.jsonl``.

    Raises:
        DataError: the folder has no samples, or not all of them yet.
    """
    files = sorted(folder.glob("samples-*.jsonl"))
    if not files:
        raise DataError(f"{folder}: no samples-*.jsonl; give the folder that 'maporl verifier generate' wrote")
    manifest = folder / MANIFEST
    if manifest.is_file() and not json.loads(manifest.read_text())["complete"]:
        raise DataError(f"{folder}: not all questions are sampled yet; finish with the same 'maporl verifier generate'")
    return read_samples(files)


def write_new(file: Path, text: str) -> None:
    """Write a new file, whole or not at all.

    Raises:
        RunExists: the file exists already.
    """
    must_not_exist(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, text)


def must_not_exist(file: Path) -> None:
    """Check that ``file`` does not exist yet. Asked before a long piece of work, so that it is not lost.

    Raises:
        RunExists: it exists.
    """
    if file.exists():
        raise RunExists(f"{file}: exists, and nothing was overwritten; choose another file (--output)")


def sha256(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
