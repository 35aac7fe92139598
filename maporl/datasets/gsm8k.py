"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): grade-school word problems with a number for an answer."""

import re
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from maporl.grading import grade_mathematics, label_of
from maporl.grading import number as number_of
from maporl.tasks.base import ReadTask, meta_of, read_examples, source_of, text_of
from maporl.text import asked_with
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, option


@dataclass(frozen=True)
class GSM8K(ReadTask):
    """Grade-school word problems with a number for an answer (GSM8K)."""

    source: str = option(
        "openai/gsm8k:main", "The hub's openai/gsm8k:main, or a .jsonl file of rows with `question` and `answer`."
    )
    question_column: str = option("question", "The column of the questions.")
    answer_column: str = option("answer", "The column of the answers.")
    eval_source: str | None = option(
        None, "What evaluations ask, in the same form. Default: the test split of the data set on the hub."
    )
    limit: Positive | None = option(None, "Take the first rows only, so many.")
    instruction: str = asked_with("{question}\n\nReason briefly, then end with one line: Answer: <number>")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    @cached_property
    def _examples(self) -> list[Example]:
        columns = {"question_column": self.question_column, "answer_column": self.answer_column}
        read = partial(_example, self.question_column, self.answer_column)
        split = "train" if self.split == "train" else "test"
        return read_examples(source_of(self), split, read, columns)[: self.limit]

    answer_form = "Answer: <number>"

    def solution(self, example: Example) -> str:
        """The data set's worked solution without its calculator marks, and then the answer line."""
        worked = re.sub(r"<<[^<>\n]*>>", "", str(example.meta.get("solution", ""))).split("####")[0].strip()
        return f"{worked}\nAnswer: {example.answer}".strip()

    def grade(self, example: Example, text: str) -> Grade:
        return grade_mathematics(text, example.answer)


def _example(of_question: str, of_answer: str, row: dict, number: int) -> Example:
    """The example in a row, from its columns of the question and of the answer."""
    # its label follows #### or is in the last box of the answer, or is all of it, without commas between thousands
    question, answer = (text_of(row.get(part), part) for part in (of_question, of_answer))
    name = str(row.get("id", f"gsm8k-{number}"))
    try:
        label, worked = label_of(answer)
    except ValueError as error:
        raise ValueError(f"({name:.100}) has {error}; put the number after #### or into \\boxed{{}}") from None
    if "," in label and number_of(label) is None:
        raise ValueError(f"({name:.100}) has the answer {label!r:.100}, not a number; write 1,234.5 or 1234.5")
    solution = worked if worked is not None else meta_of(row).get("solution", "")
    return Example(name, question, label, {"solution": solution})
