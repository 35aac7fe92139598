"""A data set of prompts without labels, as TRL's ``GRPOTrainer`` takes it. Reward functions score the answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from maporl.tasks.base import Task, TaskError, check_columns, read_rows, source_of
from maporl.types import Example, Grade, Message, message_fault
from trl_ext.ppo.options import Positive, option


class _PromptRows(Task):
    """A task whose examples are rows with a column ``prompt``."""

    rows: Sequence[Mapping[str, Any]]

    labelled = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rows) == 0:
            raise TaskError("prompts: the data set is empty; expected rows with a column 'prompt'")
        for number, row in enumerate(self.rows):
            _check(row, number)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        number = range(len(self))[index]
        prompt = self.rows[number]["prompt"]
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return Example(f"prompt {number}", question, "", {"row": number})

    def grade(self, example: Example, text: str) -> Grade:
        """Return that the answer cannot be graded."""
        return Grade(None, None, "a data set of prompts has no labels")

    def prompt(self, example: Example) -> str | list[Message]:
        """Return the row's prompt as it is: a text, or messages."""
        prompt = self.rows[example.meta["row"]]["prompt"]
        return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]

    def before_question(self, example: Example) -> list[Message]:
        """Return the messages of the prompt before its last one."""
        prompt = self.prompt(example)
        return [] if isinstance(prompt, str) else prompt[:-1]

    def columns(self, example: Example) -> dict[str, Any]:
        """Return the other columns of the row."""
        return {name: value for name, value in self.rows[example.meta["row"]].items() if name != "prompt"}


@dataclass(frozen=True)
class Prompts(_PromptRows):
    """The rows of a data set with a column ``prompt``, which is a text or a list of messages.

    Every agent is asked the prompt. The last of a prompt's messages is the question, and must be the user's. The
    earlier ones, such as a system prompt, come before it in each agent's conversation. Reward functions get the other
    columns.

    The task has no labels. Answers are therefore not graded, and metrics have no accuracy. Rewards say what is learned.

    Raises:
        TaskError: the data set is empty, or a row has no prompt, or a prompt that is neither a text nor messages of
            texts.
    """

    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    split: str = "train"


@dataclass(frozen=True)
class PromptDataset(_PromptRows):
    """The task ``prompts`` of a configuration: :class:`Prompts` that are read from a file or from the hub.

    The rows have a column ``prompt``, and reward functions get the other columns.

    Raises:
        TaskError: the source cannot be read or has no rows, a row has no prompt, or a file has nothing to evaluate on.
        ValueError: ``limit`` is below 1.
    """

    source: str = option(
        help='A .jsonl, .json, .csv or .parquet file, or the name of a data set on the hub, whose split "train" is '
        "read."
    )
    eval_source: str | None = option(
        None, 'What evaluations ask, in the same form. Default: the split "test" of the data set on the hub.'
    )
    prompt_column: str = option("prompt", "The column of the prompts.")
    limit: Positive | None = option(None, "Take the first rows only, so many.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """The rows of the split.

        Raises:
            TaskError: they cannot be read.
        """
        source = source_of(self)
        rows = read_rows(source, "test" if self.split == "eval" and self.eval_source is None else "train")
        if len(rows):
            check_columns(rows[0], source, {"prompt_column": self.prompt_column})
        some = [rows[number] for number in range(min(len(rows), self.limit or len(rows)))]
        if self.prompt_column == "prompt":
            return some
        return [{"prompt" if name == self.prompt_column else name: row[name] for name in row} for row in some]


def questions_of(
    task: Task | None,
    train_dataset: Sequence[Mapping[str, Any]] | None,
    eval_task: Task | None,
    eval_dataset: Sequence[Mapping[str, Any]] | None,
) -> tuple[Task, Task | None]:
    """Return the questions to train on and those to evaluate on. Each is a task or a data set of prompts.

    Raises:
        ValueError: both or neither of them are given to train on, or both to evaluate on, or a task is empty.
        TaskError: a data set has no rows, or a row is wrong.
    """
    if (task is None) == (train_dataset is None):
        got = "neither" if task is None else "both"
        raise ValueError(f"expected either task or train_dataset, got {got}; a data set has a column 'prompt'")
    if eval_task is not None and eval_dataset is not None:
        raise ValueError("expected either eval_task or eval_dataset, got both; remove one")
    if train_dataset is not None:
        task = Prompts(train_dataset)
    if eval_dataset is not None:
        eval_task = Prompts(eval_dataset, "eval")
    assert task is not None  # or train_dataset was given
    for name, value, rows in (("task", task, "train_dataset"), ("eval_task", eval_task, "eval_dataset")):
        if isinstance(value, type) and issubclass(value, Task):
            raise ValueError(f"{name}: expected an object, got the class {value.__name__}; write {value.__name__}(...)")
        if value is not None and not isinstance(value, Task):
            raise ValueError(f"{name}: expected a maporl.Task, got {type(value).__name__}; pass a data set as {rows}")
    if len(task) == 0:
        raise ValueError("task: expected at least one example, got an empty task")
    return task, eval_task


def _check(row: Any, number: int) -> None:
    where = f"prompts: row {number}"  # as in rows[number]
    if not isinstance(row, Mapping) or "prompt" not in row:
        got = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise TaskError(f"{where}: expected a column 'prompt', got {got}; rename the column that holds the question")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise TaskError(f"{where}: the prompt is empty; remove the row or fill it in")
        return
    if not isinstance(prompt, list | tuple) or not prompt:
        raise TaskError(f"{where}: expected a text or a list of messages as prompt, got {prompt!r:.80}")
    if (why := message_fault(prompt)) is not None:
        raise TaskError(f"{where}: its prompt cannot be read: {why}")
    if prompt[-1]["role"] != "user":
        raise TaskError(f"{where}: the last message must be the user's, to be answered, got {prompt[-1]['role']!r}")
