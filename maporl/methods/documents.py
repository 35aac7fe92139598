"""Documents of one's own, which a proposer reads to write questions. Imports no torch."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from maporl.tasks.base import FILES, Task, TaskError, is_file, read_rows, read_text
from maporl.tasks.registry import build_task
from maporl.types import Example, Grade, Message
from trl_ext.ppo.options import Positive, option

TEXTS = (".txt", ".md")
"""The endings of files that are one text each."""


@dataclass(frozen=True)
class Documents(Task):
    """Documents to train on, in place of questions, for ``protocol: {name: propose, vouch: stated}`` (SPICE, arXiv
    2510.24684).

    A ``.txt`` or ``.md`` file is one text. A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file has a text in each
    row, as a data set has.

    Raises:
        ValueError: ``longest`` or ``limit`` is too small, or ``questions`` describes no task with labels.
        TaskError: a source cannot be read or has no text.
    """

    source: str = option(
        help='A file, a pattern for several (`corpus/**/*.txt`), or a data set on the hub, of which the split "train" '
        "is read."
    )
    questions: dict[str, Any] = option(
        help="The section of another task, such as {name: hotpotqa}. Evaluations ask its held-out questions, and its "
        "grader compares answers with the stated ones."
    )
    column: str = option("text", "The column of the texts.")
    longest: Annotated[int, Ge(100)] = option(
        20_000,
        "Most characters of a document. A longer text is several: it is cut at an empty line if one is in the second "
        "half of what fits, or else at a space.",
    )
    limit: Positive | None = option(
        None,
        "Number of texts that are read, empty ones among them, in the order of the files' names; so there may be more "
        "documents.",
    )
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.asked.mixed or not (self.asked.labelled and self.asked.has_questions):
            raise ValueError(f"questions: expected a task with labels, as gsm8k, got {self.questions.get('name')!r}")

    @cached_property
    def asked(self) -> Task:
        """The task whose questions evaluations ask."""
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
        examples = [
            Example(f"document-{number}-{place}", part, "", {"document": part})
            for number, text in enumerate(islice(self._texts(), self.limit))
            for place, part in enumerate(pieces(text, self.longest))
        ]
        if not examples:
            raise TaskError(f"documents: {self.source}: it holds no text")
        return examples

    def _texts(self) -> Iterator[str]:
        pattern = any(sign in self.source for sign in "*?[") and not Path(self.source).exists()
        local = pattern or is_file(self.source) or self.source.lower().endswith(TEXTS) or Path(self.source).is_dir()
        if not local:  # a data set on the hub
            yield from self._rows(self.source)
            return
        paths = sorted(glob.glob(self.source, recursive=True)) if pattern else [self.source]
        files = [Path(path) for path in paths if not (pattern and Path(path).is_dir())]
        if not files:
            raise TaskError(
                f"documents: {Path(self.source).absolute()}: no file has such a name; give a text file, a pattern such "
                "as corpus/*.txt, a .jsonl file or the hub name of a data set"
            )
        for path in files:
            if path.suffix.lower() in TEXTS or path.is_dir():
                yield read_text(path)
            else:
                yield from self._rows(str(path))

    def _rows(self, source: str) -> Iterator[str]:
        try:
            rows = read_rows(source, "train")
        except TaskError as error:
            if not is_file(source) or source.lower().endswith(FILES):
                raise
            raise TaskError(f"{error}; a file that is one text ends in {' or '.join(TEXTS)}") from None
        return (_text_of(row, self.column, number, source) for number, row in enumerate(rows))

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

    def show_meta(self, example: Example) -> dict[str, Any]:
        """What the task of the questions shows."""
        return self.asked.show_meta(example)

    def solution(self, example: Example) -> str:
        """A right answer in the form of the task of the questions."""
        return self.asked.solution(example)


def pieces(text: str, longest: int) -> list[str]:
    r"""Return a text in parts of at most ``longest`` characters, each cut at the last empty line of its second half, or
    else at a space.

    >>> pieces("One two.\n\nThree four. Five six.", 16), pieces("abcdef", 4), pieces("  ", 4)
    (['One two.', 'Three four. Five', 'six.'], ['abcd', 'ef'], [])
    """
    text = text.strip()
    parts, start = [], 0
    while len(text) - start > longest:
        half, end = start + longest // 2, start + longest + 1
        cut = text.rfind("\n\n", half, end)
        cut = text.rfind(" ", half, end) if cut < 0 else cut
        cut = start + longest if cut < 0 else cut
        parts.append(text[start:cut].strip())
        start = cut
        while text[start].isspace():  # it ends, because the text ends with something else
            start += 1
    return [*parts, text[start:]] if text else parts


def _text_of(row: dict[str, Any], column: str, number: int, source: str) -> str:
    text = row.get(column)
    if isinstance(text, str):
        return text
    where = f"documents: {source}: row {number + 1}"
    if column in row:
        what = "null" if text is None else type(text).__name__
        raise TaskError(f"{where}: expected a text in the column {column!r}, got {what}; remove it, or set task.column")
    raise TaskError(f"{where} has no text in the column {column!r}, but {sorted(row)}; set task.column")
