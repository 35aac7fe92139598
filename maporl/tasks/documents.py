"""Documents of one's own, which a proposer reads to write questions. Imports no torch."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from maporl.tasks.base import Task, TaskError, is_file, read_rows
from maporl.tasks.mixture import Mixture
from maporl.text import read_users_text
from maporl.types import Example, Grade, Message

TEXTS = (".txt", ".md")
"""The endings of files that are one document each."""


@dataclass(frozen=True)
class Documents(Task):
    """Documents to train on, in place of questions, for ``protocol: {name: propose, vouch: stated}`` (SPICE, arXiv 2510.24684).

    ``source`` is a text file (``.txt`` or ``.md``), a pattern for several (``corpus/**/*.txt``), or rows with the text in ``column``: a
    ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or the split "train" of a data set on the hub. A document of more than
    ``longest`` characters is cut into several, at an empty line if one is in its second half, or else at a space. ``limit``
    takes the first documents only.

    ``questions`` is the section of another task, such as ``{name: hotpotqa}``. Evaluations ask its held-out questions, and
    its grader compares answers with the stated ones.

    Raises:
        ValueError: ``longest`` or ``limit`` is too small, or ``questions`` describes no task with labels.
        TaskError: a source cannot be read or has no text.
    """

    source: str
    questions: dict[str, Any]
    column: str = "text"
    longest: int = 20_000
    limit: int | None = None
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < 100:
            raise ValueError(f"longest: expected at least 100 characters, got {self.longest}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected at least 1 document, got {self.limit}")
        if isinstance(self.asked, Mixture) or not (self.asked.labelled and self.asked.has_questions):
            raise ValueError(
                f"questions: {self.questions.get('name')!r} cannot grade an answer to a question of a document; name a task with "
                "labels, such as hotpotqa or gsm8k"
            )

    @cached_property
    def asked(self) -> Task:
        """The task whose questions evaluations ask."""
        from maporl.tasks import build_task  # which knows this class

        return build_task(self.questions, self.split, self.seed, "task.questions")

    @property
    def answer_form(self) -> str:  # type: ignore[override]  # it follows from the questions
        """The form in which agents are asked for a final answer."""
        return self.asked.answer_form

    def __len__(self) -> int:
        return len(self.asked) if self.split == "eval" else len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self.asked[index] if self.split == "eval" else self._examples[index]

    @cached_property
    def _examples(self) -> list[Example]:
        texts = self._texts()[: self.limit]
        examples = [
            Example(f"document-{number}-{place}", part, "", {"document": part})
            for number, text in enumerate(texts)
            for place, part in enumerate(pieces(text, self.longest))
        ]
        if not examples:
            raise TaskError(f"documents: {self.source}: it holds no text")
        return examples

    def _texts(self) -> list[str]:
        rows = is_file(self.source) and not self.source.endswith(TEXTS)
        if rows or not (any(sign in self.source for sign in "*?[") or self.source.endswith(TEXTS)):
            return [_text_of(row, self.column, number, self.source) for number, row in enumerate(self._rows())]
        paths = sorted(glob.glob(self.source, recursive=True))
        files = [Path(path) for path in paths if Path(path).is_file()]
        if not files:
            raise TaskError(
                f"documents: {Path(self.source).absolute()}: no such file; give a text file, a pattern such as corpus/*.txt, a "
                ".jsonl file or the hub name of a data set"
            )
        return [_read(path) for path in files]

    def _rows(self) -> Sequence[dict[str, Any]]:
        return read_rows(self.source, "train")

    def remark(self) -> str | None:
        """How many documents there are, of how many texts."""
        if self.split == "eval":
            return self.asked.remark()
        texts = len({example.id.split("-")[1] for example in self._examples})
        return f"documents: {len(self)} of at most {self.longest} characters, from {texts} texts of {self.source}"

    def grade(self, example: Example, text: str) -> Grade:
        """The grade that the task of the questions gives."""
        return self.asked.grade(example, text)

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """The grades that the task of the questions gives."""
        return self.asked.grade_many(examples, texts)

    def question(self, example: Example) -> str:
        """The question as the task of the questions puts it, or a document as it is."""
        return example.question if "document" in example.meta else self.asked.question(example)

    def prompt(self, example: Example) -> str | list[Message]:
        """The prompt of the task of the questions."""
        return self.asked.prompt(example)

    def columns(self, example: Example) -> dict[str, Any]:
        """What the task of the questions tells reward functions."""
        return self.asked.columns(example)

    def solution(self, example: Example) -> str:
        """A right answer in the form of the task of the questions."""
        return self.asked.solution(example)


def pieces(text: str, longest: int) -> list[str]:
    r"""Return a text in parts of at most ``longest`` characters, each cut at the last empty line of its second half, or else at a space.

    >>> pieces("One two.\n\nThree four. Five six.", 16), pieces("abcdef", 4), pieces("  ", 4)
    (['One two.', 'Three four. Five', 'six.'], ['abcd', 'ef'], [])
    """
    parts = []
    left = text.strip()
    while len(left) > longest:
        cut = left.rfind("\n\n", longest // 2, longest + 1)
        cut = left.rfind(" ", longest // 2, longest + 1) if cut < 0 else cut
        cut = longest if cut < 0 else cut
        parts.append(left[:cut].strip())
        left = left[cut:].strip()
    return [*parts, left] if left else parts


def _text_of(row: dict[str, Any], column: str, number: int, source: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        raise TaskError(
            f"documents: {source}: row {number + 1} has no text in the column {column!r}, but {sorted(row)}; set task.column"
        )
    return text


def _read(path: Path) -> str:
    try:
        return read_users_text(path)
    except (UnicodeDecodeError, OSError) as error:
        raise TaskError(f"documents: {path}: cannot be read: {error}; save it as UTF-8") from None
