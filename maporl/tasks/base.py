"""The Task contract, and reading examples from a JSONL file or the hub."""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from maporl.errors import UserError
from maporl.types import Example, Grade


class TaskError(UserError, ValueError):
    """Data that cannot serve as a task."""

    exit_status = 2


class Task(ABC):
    """Questions with labels, how to ask them, and how to grade an answer.

    A task is a sequence of :class:`Example`; it is a frozen dataclass whose fields are its options, and it knows its
    ``split`` ("train" or "eval"). To add one, subclass, and put it in ``maporl.tasks.TASKS``.
    """

    name: ClassVar[str] = "task"
    """What messages call it: the class's name in lower case, unless a subclass sets its own."""
    answer_form = "Answer: <final answer>"
    """The form in which agents are asked for a final answer."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Example: ...

    @abstractmethod
    def grade(self, example: Example, text: str) -> Grade:
        """What ``text`` answers and whether that is right."""

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """:meth:`grade` for each pair; tasks whose graders work in batches override it."""
        return [self.grade(example, text) for example, text in zip(examples, texts, strict=True)]

    def question(self, example: Example) -> str:
        """The question as agents are asked it, with the form of the answer that grading expects."""
        return example.question

    def solution(self, example: Example) -> str:
        """A right answer in the asked form, as supervised training is to teach it."""
        return f"Answer: {example.answer}"

    def remark(self) -> str | None:
        """A line about how this split was read, for people, or None; ``maporl check`` prints it."""
        return None

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """An answer as a pupil would write it, right or wrong; only tasks that can serve for a warm start have it."""
        raise NotImplementedError(f"task {type(self).__name__} cannot write example answers")

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))


class ReadTask(Task):
    """A task whose examples are read once, the first ``limit`` of them, and put as ``instruction`` says."""

    limit: int | None
    instruction: str

    @property
    @abstractmethod
    def _examples(self) -> Sequence[Example]: ...

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected at least 1 row, got {self.limit}")
        if "{question}" not in self.instruction:
            raise ValueError("instruction: expected the text to contain {question}")

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def question(self, example: Example) -> str:
        """The instruction with the question in its place."""
        return self.instruction.replace("{question}", example.question)


def read_examples(source: str, split: str, convert: Callable[[dict[str, Any], int], Example]) -> list[Example]:
    """Examples from ``source``: a ``.jsonl`` file, or the hub name of a data set whose ``split`` is taken.

    ``convert(row, number)`` makes the Example, or raises ValueError saying what is wrong with the row; rows without a
    question or an answer are errors that name the row.
    """
    examples = []
    for number, row in enumerate(read_rows(source, split)):
        try:
            example = convert(row, number)
        except ValueError as error:
            raise TaskError(f"{source}: row {number + 1} {error}") from error
        for part in ("question", "answer"):
            if not isinstance(getattr(example, part), str) or not getattr(example, part).strip():
                raise TaskError(
                    f"{source}: row {number + 1} ({example.id}) has no {part}; remove the row or fill it in"
                )
        examples.append(example)
    if not examples:
        raise TaskError(f"{source}: split {split!r} holds no rows")
    return examples


def is_file(source: str) -> bool:
    """Whether ``source`` is a file rather than the hub name of a data set."""
    return source.endswith((".jsonl", ".json")) or Path(source).is_file()


def read_rows(source: str, split: str) -> Sequence[dict[str, Any]]:
    """Rows of a ``.jsonl`` file, whatever ``split`` says, or of the ``split`` of a data set on the hub."""
    if is_file(source):
        return _jsonl_rows(Path(source))
    from datasets import load_dataset  # heavy, and needed for hub names only

    name, _, configuration = source.partition(":")
    try:
        return load_dataset(name, configuration or None, split=split)
    except Exception as error:
        raise TaskError(
            f"{source}: the data set could not be loaded ({type(error).__name__}: {error}); "
            "give a hub name (org/name or org/name:configuration) or the path of a .jsonl file"
        ) from error


def _jsonl_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise TaskError(f"{path}: no such file; give the path of a .jsonl file or the hub name of a data set")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TaskError(
                f"{path}: line {number}: expected an object with 'question' and 'answer', got {type(row).__name__}"
            )
        rows.append(row)
    return rows
