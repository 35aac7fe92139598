"""The contract of a task, and how examples are read from a file or from the hub. Imports no torch."""

import csv
import difflib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from maporl.errors import UserError
from maporl.grading import LONGEST_LABEL
from maporl.text import BOM, encoding_of, read_users_text, well_formed
from maporl.types import Example, Grade, Message
from trl_ext.errors import one_line, retold
from trl_ext.ppo.options import Checked, Positive
from trl_ext.process import hub


class TaskError(UserError, ValueError):
    """Data that no task can be made of; the message names the file or data set, and the row."""

    exit_status = 2


class Task(Checked, ABC):
    """Questions with labels, how to ask them, and how to grade an answer.

    A task is a sequence of :class:`Example`. It is a frozen dataclass whose fields are its options, and it knows its
    ``split`` ("train" or "eval"). To add one, derive a class and put it into ``maporl.tasks.TASKS``.
    :class:`maporl.Lessons` has what a task may write besides for tiny models, which know nothing before a warm start.
    """

    name: ClassVar[str] = "task"
    """Its name in messages: that of the class in lower case, unless a class sets another."""
    has_questions: ClassVar[bool] = True
    """Whether its examples are questions. If not, they only count episodes, and the protocol brings what is asked."""
    answer_form = "Answer: <final answer>"
    """The form in which agents are asked for a final answer."""
    mixed: ClassVar[bool] = False
    """Whether its questions are those of several other tasks, each graded by its own."""
    labelled: ClassVar[bool] = True
    """Whether answers can be right or wrong. If not, evaluations measure rewards in place of accuracy."""
    labels_graded: ClassVar[int] = 4
    """How many labels of a split are graded before a run, to count those that cannot be read. Grading may be slow."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    shown_meta: ClassVar[Collection[str]] = ()
    """The keys of an example's ``meta`` that an agent may see, such as ``("paragraphs",)``. Programs get no others,
    because ``meta`` may have the solution, or hidden tests."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Example: ...

    @abstractmethod
    def grade(self, example: Example, text: str) -> Grade:
        """Which answer ``text`` gives, and whether it is right."""

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """:meth:`grade` for each pair. A task whose grader works in batches overrides it."""
        return [self.grade(example, text) for example, text in zip(examples, texts, strict=True)]

    def question(self, example: Example) -> str:
        """The question as it is put to agents, with the form in which grading expects the answer."""
        return example.question

    def prompt(self, example: Example) -> str | list[Message]:
        """The prompt as reward functions get it: a text, or the messages that a data set gives."""
        return self.question(example)

    def before_question(self, example: Example) -> list[Message]:
        """The messages that come before the question in each agent's conversation."""
        return []

    def columns(self, example: Example) -> dict[str, Any]:
        """What reward functions get about the example, by keyword."""
        return {"answer": example.answer}

    def show_meta(self, example: Example) -> dict[str, Any]:
        """The part of the example's ``meta`` that an agent may see: by default the keys of :attr:`shown_meta`."""
        return {name: value for name, value in example.meta.items() if name in set(self.shown_meta)}

    def solution(self, example: Example) -> str:
        """A right answer in the expected form, for supervised training."""
        return f"Answer: {example.answer}"

    def reads_label(self, example: Example) -> bool:
        """Whether some answer can be graded, because the label can be read: the right one, or the bare label."""
        said = (self.solution(example), example.answer)
        return any(self.grade(example, text).correct is not None for text in said)

    def question_key(self, example: Example) -> str:
        """What tells a question from all others: what agents are shown of it, without differences of blanks and case.

        A task whose tools or environments know more about an example adds it.
        """
        shown = [*(message["content"] for message in self.before_question(example)), self.question(example)]
        return " ".join(" ".join(shown).split()).casefold()

    def remark(self) -> str | None:
        """A line for people about how this split was read, or None. ``maporl check`` prints it."""
        return None

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))


def tasks_by_name(task: Task, held_out: Task | None, curriculum: Iterable[tuple[int, Task]] = ()) -> dict[str, Task]:
    """Return all tasks of a run, by names for people such as "gsm8k, train".

    ``curriculum`` has pairs of the update from which a task is trained on and the task.
    """
    stages = {f"{later.name}, train from update {update}": later for update, later in curriculum}
    evaluation = {} if held_out is None else {f"{held_out.name}, eval": held_out}
    return {f"{task.name}, train": task, **evaluation, **stages}


def in_place_of_question(example: Example) -> bool:
    """Return whether an example is a document to write questions on, as those of :class:`maporl.Documents` are, and no
    question.

    >>> in_place_of_question(Example("1", "A novel.", "", {"document": "A novel."})), in_place_of_question(Example("1", "Who?", "Emma"))
    (True, False)
    """  # noqa: E501
    return bool(example.question) and example.meta.get("document") == example.question


class ReadTask(Task):
    """A task that reads its first ``limit`` examples once and puts each question into ``instruction``.

    Raises:
        ValueError: ``limit`` is below 1, or ``instruction`` has no place for the question.
    """

    limit: Positive | None
    instruction: str

    labels_graded = 2_000

    @property
    @abstractmethod
    def _examples(self) -> Sequence[Example]: ...

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def question(self, example: Example) -> str:
        """The instruction, with the question in the place of ``{question}``."""
        return self.instruction.replace("{question}", example.question)


def read_examples(
    source: str,
    split: str,
    convert: Callable[[dict[str, Any], int], Example],
    columns: Mapping[str, str] | None = None,
) -> list[Example]:
    """Examples from ``source``: a file (:func:`read_rows`), or the ``split`` of a data set on the hub.

    Raises:
        TaskError: the source cannot be read or holds no rows, lacks one of the ``columns`` (:func:`examples_of`), or a
            row is wrong or has no question or no answer.
    """
    return examples_of(read_rows(source, split), source, convert, columns)


def examples_of(
    rows: Sequence[dict[str, Any]],
    source: str,
    convert: Callable[[dict[str, Any], int], Example],
    columns: Mapping[str, str] | None = None,
) -> list[Example]:
    """Return an example for each of the ``rows`` of ``source``.

    Args:
        rows: the rows.
        source: where they come from.
        convert: makes an example of a row and its number, or raises a ValueError that says what is wrong with the row.
            A question or an answer that is not a text yet becomes one (:func:`text_of`).
        columns: the column that each option of the task names, such as ``{"question_column": "question"}``. The first
            row must have them.

    Raises:
        TaskError: ``rows`` is empty, lacks a column, or a row is wrong, has no question or no answer, or an answer that
            is too long to be graded.
    """
    if columns and len(rows):
        check_columns(rows[0], source, columns)
    examples = []
    for number, row in enumerate(rows):
        try:
            example = convert(row, number)
            texts: dict[str, Any] = {p: text_of(getattr(example, p), p) for p in ("question", "answer")}
        except ValueError as error:
            raise TaskError(f"{source}: row {number + 1} {error}") from error
        example = replace(example, **texts)
        for part in texts:
            if not texts[part].strip():
                has = "" if part in row else f"; its columns are {', '.join(map(str, row))}"
                raise TaskError(f"{source}: row {number + 1} ({example.id}) has no {part}{has}; remove or fill it")
        if len(example.answer) > LONGEST_LABEL:
            raise TaskError(
                f"{source}: row {number + 1} ({example.id:.100}) has an answer of {len(example.answer)} characters; "
                f"expected at most {LONGEST_LABEL}, which is all that is graded; remove the row"
            )
        examples.append(example)
    if not examples:
        raise TaskError(f"{source}: it holds no rows")
    return examples


class _Written(float):
    """A number of a JSON file, with the ``text`` that stands there, such as ``1.50``."""

    def __init__(self, text: str):
        self.text = text


def text_of(value: Any, column: str) -> str:
    """Return the text of a question or a label as its file has it, or an empty text for None.

    Numbers have one if all their digits are known: integers, decimals, those of a JSON file, and other floats of at
    most 15 digits.

    >>> text_of("0011", "answer"), text_of(18, "answer"), text_of(2.5, "answer"), text_of(None, "answer")
    ('0011', '18', '2.5', '')

    Raises:
        ValueError: it is something else, such as a list, bytes, a date or a truth value, which several texts stand for,
            or a float whose last digits are lost.
    """
    if isinstance(value, _Written):
        return value.text
    exact = isinstance(value, str | int | Decimal | None) and not isinstance(value, bool)
    if exact or (isinstance(value, float) and abs(value) < 1e15 and float(f"{value:.15g}") == value):
        return "" if value is None else str(value)
    raise ValueError(
        f"has {value!r:.80} of the type {type(value).__name__} in the column {column!r}; expected a text, or a number "
        "of at most 15 digits; write a text there, in quotes, or name another column"
    )


def meta_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row's column ``meta``, or no fields if it holds something else, as in CSV files."""
    meta = row.get("meta")
    return meta if isinstance(meta, dict) else {}


LIKE = {
    "question": ("problem", "prompt", "query", "input", "instruction", "q", "task", "text"),
    "answer": ("final_answer", "final", "solution", "label", "target", "output", "completion", "response", "gold", "a"),
    "prompt": ("question", "problem", "query", "input", "instruction", "messages", "text", "q"),
}
"""What other data sets call a column, the likeliest first."""


def check_columns(row: Mapping[str, Any], source: str, columns: Mapping[str, str]) -> None:
    """Check that ``row``, the first one of ``source``, has the column that each option of the task names.

    >>> check_columns({"problem": "1+1", "final": "2"}, "x.jsonl", {"question_column": "question"})
    Traceback (most recent call last):
    maporl.tasks.base.TaskError: x.jsonl: no column 'question'; it has problem, final: set task.question_column: problem

    Raises:
        TaskError: it lacks some. The message lists the columns that it has, and says which may be meant.
    """
    names = [str(name) for name in row]
    lower = {name.lower(): name for name in names}
    lacking, remedies = [], []
    for option, column in columns.items():
        if column in row or column.partition(".")[0] in row:
            continue
        what = option.split("_")[-2]
        near = difflib.get_close_matches(column, names, 1, 0.7)
        near += [lower[like] for like in LIKE.get(what, ()) if like in lower]
        lacking.append(repr(column))
        remedies.append(f"task.{option}: {near[0] if near else f'the one with the {what}s'}")
    if lacking:
        has = ", ".join(names)[:300] or "none"
        raise TaskError(f"{source}: no column {' and '.join(lacking)}; it has {has}: set {' and '.join(remedies)}")


FILES = (".jsonl", ".json", ".csv", ".parquet")
"""The endings of files that :func:`read_rows` reads."""


def is_file(source: str) -> bool:
    """Whether ``source`` is the path of a file, and not the name of a data set on the hub."""
    return source.lower().endswith(FILES) or Path(source).is_file()


def source_of(task: Any) -> str:
    """Return what a split of a task is read from: ``source``, or in evaluations ``eval_source``, if it is given.

    Raises:
        TaskError: an evaluation has no ``eval_source``, and its ``source`` is one file, which has no other split.
    """
    if task.split == "eval" and task.eval_source is None and is_file(task.source):
        no = f"{task.source} is one file and has no test split"
        raise TaskError(f"{no}; set task.eval_source, or evaluation.questions to 0")
    return task.source if task.split == "train" else task.eval_source or task.source


def read_rows(source: str, split: str) -> Sequence[dict[str, Any]]:
    """The rows of a file, which has no splits, or of the ``split`` of a data set on the hub.

    A file has one of the endings :data:`FILES`, or else holds JSON lines. All values of CSV files are texts, exactly as
    they stand there, also those of a data set on the hub.

    Raises:
        TaskError: the file or the data set cannot be read, or two columns of a file have one name.
    """
    if is_file(source):
        return _rows_of_file(Path(source))
    from datasets import Features, Value, load_dataset  # slow to import, and only data sets on the hub need it

    name, _, configuration = source.partition(":")
    try:
        with hub.asking(name):
            rows = load_dataset(name, configuration or None, split=split)
            if rows.builder_name == "csv":  # which has guessed types, as of 0011, and dropped texts such as NA
                texts = Features({column: Value("string") for column in rows.column_names})
                rows = load_dataset(name, configuration or None, split=split, features=texts, keep_default_na=False)
            return rows
    except Exception as error:
        if missing := hub.not_cached(name, error):
            raise TaskError(f"{source}: {missing}, or give the path of a .jsonl file") from error
        raise TaskError(
            f"{source}: the data set could not be loaded ({type(error).__name__}: {one_line(error, 300)}); "
            "give a hub name (org/name or org/name:configuration) or the path of a .jsonl file"
        ) from error


def _rows_of_file(path: Path) -> Sequence[dict[str, Any]]:
    kind = path.suffix.lower()
    if kind == ".parquet" and path.is_file():
        import pyarrow.parquet  # slow to import

        try:
            _fields([(name, None) for name in pyarrow.parquet.read_schema(path).names])
            return pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise TaskError(f"{path}: cannot be read as parquet ({type(error).__name__}: {error})") from error
    if kind == ".csv":
        return _table(read_text(path, as_is=True), path)
    content = read_text(path)
    if kind == ".json" and content.lstrip().startswith("["):
        values = {f"row {number}": row for number, row in enumerate(_json(content, str(path)), 1)}
    else:
        lines = enumerate(content.replace(f"\n{BOM}", "\n").split("\n"), 1)  # joined files have several such marks
        values = {f"line {n}": _json(line, f"{path}: line {n}") for n, line in lines if line.strip()}
    halves = "\\ud" in content.lower()
    return [_row(value, f"{path}: {where}", halves) for where, value in values.items()]


def _table(content: str, path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, all of whose values are texts. Empty lines are left out."""
    csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # it refuses longer texts than 128 KiB by default
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    lines, rows = filter(None, reader), []
    try:
        names = next(lines, [])
        for row in lines:
            if len(row) != len(names):
                raise csv.Error(f"expected {len(names)} columns, as in the first line, got {len(row)}")
            rows.append(_fields(list(zip(names, row, strict=True))))
    except (csv.Error, ValueError) as error:
        quotes = 'texts with quotes, commas or line ends stand between double quotes, with two ("") for one in them'
        raise TaskError(f"{path}: line {reader.line_num}: cannot be read as CSV: {error}; {quotes}") from None
    return rows


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields := dict(pairs)) < len(pairs):
        twice = max(fields, key=[name for name, _ in pairs].count)
        raise ValueError(f"the name {twice!r} stands there twice; rename one")
    return fields


def read_text(path: Path, as_is: bool = False) -> str:
    """The text of a file, whose line ends become line feeds unless it is read ``as_is``.

    Raises:
        TaskError: it is missing, is a folder or no text, such as a PDF, or cannot be read.
    """
    if not path.exists():
        raise TaskError(_missing(path))
    if path.is_dir():
        raise TaskError(f"{path.absolute()}: expected a file, got a folder; give a file in it, or a pattern")
    try:
        content = read_users_text(path, as_is)
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}; give a file that can be read") from None
    except UnicodeDecodeError as error:
        _refuse_binary(path)
        raise TaskError(f"{path}: cannot be read: {error}; save it as UTF-8") from None
    if content.startswith("%PDF-") or "\0" in content:
        _refuse_binary(path)
    return content


def _refuse_binary(path: Path) -> None:
    """Refuse a file whose bytes are not those of a text."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"%PDF-") or (b"\0" in start and encoding_of(start) == "utf-8"):
        raise TaskError(f"{path}: expected a text, got a binary file that begins with {start[:8]!r}; give a .txt file")


def _missing(path: Path) -> str:
    """Return the message that a file is missing: where it was looked for, and a file of nearly this name."""
    wanted = path.absolute()
    folder = wanted.parent
    if not folder.is_dir():
        return f"{wanted}: no such file, and no such folder; give the path of a file or the hub name of a data set"
    near = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], 1)
    hint = f"did you mean {near[0]!r}?" if near else "give the path of a file or the hub name of a data set"
    return f"{wanted}: no such file; {hint}"


def _json(text: str, where: str) -> Any:
    with retold((ValueError, RecursionError), lambda error: TaskError(f"{where}: cannot be read as JSON: {error}")):
        return json.loads(text, parse_float=_Written, object_pairs_hook=_fields)


def _row(value: Any, where: str, halves: bool) -> dict[str, Any]:
    """Return ``value`` if it can serve as a row. ``halves``: whether it may have half of a surrogate pair."""
    if halves and well_formed(text := json.dumps(value, ensure_ascii=False)) != text:
        raise TaskError(f"{where} has half of a surrogate pair, which no tokenizer can read; correct the text")
    if not isinstance(value, dict):
        raise TaskError(f"{where}: expected an object with a field for each column, got {type(value).__name__}")
    return value
