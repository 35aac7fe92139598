"""Mathematics benchmarks: one task for all of them, and the suite that AgentPO and others report."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from maporl.grading import label_of
from maporl.grading.benchmarks import grade_benchmark
from maporl.tasks.base import ReadTask, TaskError, meta_of, read_examples, source_of, text_of
from maporl.text import asked_with, matches, pattern_option
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, option


@dataclass(frozen=True)
class Benchmark:
    """A data set on the hub (``org/name:configuration``), its split, and its columns of questions and answers.

    ``folder``: its name in a folder of files.
    """

    source: str
    split: str
    question: str
    answer: str
    folder: str


SUITES: dict[str, dict[str, Benchmark]] = {
    "math": {
        "gsm8k": Benchmark("openai/gsm8k:main", "test", "question", "answer", "gsm8k"),
        "math500": Benchmark("HuggingFaceH4/MATH-500", "test", "problem", "answer", "math500"),
        "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", "problem", "answer", "aime24"),
        "aime25": Benchmark("math-ai/aime25", "test", "problem", "answer", "aime25"),
        "amc23": Benchmark("math-ai/amc23", "test", "question", "answer", "amc23"),
        "olympiadbench": Benchmark(
            "Hothan/OlympiadBench:OE_TO_maths_en_COMP", "train", "question", "final_answer", "olympiadbench"
        ),
        "minerva": Benchmark("math-ai/minervamath", "test", "question", "answer", "minerva_math"),
        "svamp": Benchmark("ChilleD/SVAMP", "test", "question_concat", "Answer", "svamp"),
    }
}
"""The benchmarks of each suite by name, in the order in which they are reported."""


@dataclass(frozen=True)
class Mathematics(ReadTask):
    """A mathematics benchmark, such as MATH, AIME or AMC.

    If a row's answer is a worked solution, its last ``\\boxed{}`` is the label; what follows ``####`` is, where that is
    written. ``maporl check`` and ``maporl train`` say how many labels were taken so. A worked solution without either
    is refused.

    A column inside another one is named with a dot, such as ``reward_model.ground_truth``. If the question is a chat,
    it is the text of the last message.

    Raises:
        TaskError: a split cannot be read, a row's answer is a worked solution without a box, or no training row has one
            of the levels.
        ValueError: ``remove`` is not a regular expression.
    """

    source: str = option("HuggingFaceH4/MATH-500", "A data set on the hub, or a .jsonl file.")
    eval_source: str | None = option(
        None, "What evaluations ask. Default: the `eval_split` of the data set on the hub."
    )
    question_column: str = option("question", "The column of the questions.")
    answer_column: str = option("answer", "The column of the answers.")
    eval_question_column: str | None = option(None, "That of the questions of evaluations. Default: the same.")
    eval_answer_column: str | None = option(None, "That of their answers. Default: the same.")
    remove: str | None = pattern_option(
        None, "What this regular expression finds in a question is taken out, such as a data set's own instruction."
    )
    train_split: str = option("train", "The split of the data set that is trained on.")
    eval_split: str = option("test", "The split of the data set that is evaluated on.")
    levels: tuple[int, ...] = option(
        (),
        "Train on rows of these difficulties only. A row's difficulty is the first number in its column: 5 for MATH's "
        '"Level 5", and 3 for Polaris\'s "3/8", which is solved in 3 of 8 attempts.',
    )
    level_column: str = option("level", "The column of the difficulty.")
    limit: Positive | None = option(None, "Take the first rows only, so many.")
    instruction: str = asked_with("{question}\n\nReason step by step, and put your final answer within \\boxed{}.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    answer_form = r"\boxed{<final answer>}"

    @cached_property
    def _examples(self) -> list[Example]:
        split = self.train_split if self.split == "train" else self.eval_split
        examples = read_examples(source_of(self), split, self._example, self._columns())
        if self.split == "train" and self.levels:
            examples = [example for example in examples if example.meta.get("level") in self.levels]
            if not examples:
                raise TaskError(f"math: {self.source} has no row of the levels {list(self.levels)}; change task.levels")
        return examples[: self.limit]

    def _example(self, row: dict[str, Any], number: int) -> Example:
        question, given = self._given(row)
        name = str(row.get("id", number))
        try:
            answer, worked = label_of(given)
        except ValueError as error:
            raise ValueError(f"({name:.100}) has {error}; name task.answer_column, or put it into \\boxed") from None
        no = (None, "", "False", "false")  # texts in CSV files
        meta = meta_of(row) or {k: row[k] for k in ("is_multiple_answer", "error") if row.get(k) not in no}
        if worked is not None:
            meta = {"solution": worked, **meta, "label_from_solution": True}
        if self.levels:
            number_found = re.search(r"\d+", str(_column(row, self.level_column)))
            meta = {**meta, "level": int(number_found[0]) if number_found else None}
        return Example(name, question, answer, dict(meta))

    def _columns(self) -> dict[str, str]:
        """Return the columns of the question and of the answer in this split, by the options that name them."""
        columns = {"question_column": self.question_column, "answer_column": self.answer_column}
        if self.split == "eval":
            own = {
                "eval_question_column": self.eval_question_column,
                "eval_answer_column": self.eval_answer_column,
            }
            columns = {
                (name if named is None else key): (column if named is None else named)
                for (name, column), (key, named) in zip(columns.items(), own.items(), strict=True)
            }
        return columns

    def _given(self, row: dict[str, Any]) -> tuple[str, str]:
        """Return the text of the question, and that of the answer, in which commas stand between several."""
        of_question, of_answer = self._columns().values()
        question, answer = _column(row, of_question), _column(row, of_answer)
        if isinstance(question, list) and question and isinstance(question[-1], dict):
            question = question[-1].get("content")
        text = text_of(question, of_question)
        several = answer if isinstance(answer, list | tuple) else [answer]
        told = ", ".join(text_of(one, of_answer) for one in several)
        return text if self.remove is None else _without(self.remove, text), told

    def remark(self) -> str | None:
        """How many labels were taken out of worked solutions, as a line for people."""
        taken = sum("label_from_solution" in example.meta for example in self._examples)
        if not taken:
            return None
        source = self.eval_source or self.source if self.split == "eval" else self.source
        return (
            f"math: {self.split}: {taken} of {len(self)} labels are the last box or marked answer of a worked solution "
            f"in {source}; if another column has the final answers, name it in task.answer_column"
        )

    def solution(self, example: Example) -> str:
        """The data set's solution, if it has one, and the answer in a box."""
        return f"{example.meta.get('solution') or ''}\n\\boxed{{{example.answer}}}".strip()

    def grade(self, example: Example, text: str) -> Grade:
        """Compare the last ``\\boxed{}``, or without one the last ``Answer:``, with the label."""
        return grade_benchmark(text, example.answer, example.meta)


def _without(pattern: str, text: str) -> str:
    r"""``text`` without what ``pattern`` finds in it.

    >>> _without(r"\s*Think hard\.", "2+2? Think hard.")
    '2+2?'
    """
    pieces, end = [], 0
    for match in matches(pattern, text):
        pieces.append(text[end : match.start()])
        end = match.end()
    return "".join([*pieces, text[end:]])


def _column(row: dict[str, Any], name: str) -> Any:
    """Return the value of a column of ``row``, or of a column inside another one (``outer.inner``); None if absent."""
    outer, _, inner = name.partition(".")
    value = row.get(name, row.get(outer))
    return value.get(inner) if inner and name not in row and isinstance(value, dict) else value


def suite_tasks(suite: str, data: Path | None, limit: int | None) -> dict[str, Mathematics]:
    """The benchmarks of a suite as evaluation tasks by name, from the hub or from the files ``data/NAME/test*.jsonl``.

    Raises:
        TaskError: ``data`` lacks the file of a benchmark.
    """
    tasks = {}
    for name, benchmark in SUITES[suite].items():
        if data is None:
            tasks[name] = Mathematics(
                source=benchmark.source,
                question_column=benchmark.question,
                answer_column=benchmark.answer,
                eval_split=benchmark.split,
                limit=limit,
                split="eval",
            )
            continue
        files = sorted((data / benchmark.folder).glob("test*.jsonl"))
        if not files:
            raise TaskError(
                f"{data / benchmark.folder}: no test*.jsonl there; expected a folder for each of "
                f"{', '.join(SUITES[suite])}, or leave --suite-data out to read from the hub"
            )
        tasks[name] = Mathematics(eval_source=str(files[0]), limit=limit, split="eval")
    return tasks
