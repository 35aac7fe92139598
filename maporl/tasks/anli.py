"""Adversarial NLI (Nie et al. 2020, arXiv 1910.14599): does a premise entail, contradict or leave open a hypothesis?"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from maporl.grading import grade_label
from maporl.tasks.base import Task, TaskError, read_examples
from maporl.types import Example, Grade

LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class ANLI(Task):
    """``source``: the hub's ``facebook/anli`` (round ``round``), or a ``.jsonl`` file; ``eval_source`` likewise."""

    source: str = "facebook/anli"
    eval_source: str | None = None
    round: Literal[1, 2, 3] = 3
    limit: int | None = None
    instruction: str = (
        "{question}\n\nDoes the premise entail the hypothesis (entailment), contradict it (contradiction), or neither "
        "(neutral)? Reason briefly, then end with one line: Answer: <entailment, neutral or contradiction>"
    )
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected at least 1 row, got {self.limit}")
        if "{question}" not in self.instruction:
            raise ValueError("instruction: expected the text to contain {question}")

    @cached_property
    def _examples(self) -> list[Example]:
        if self.split == "train":
            return read_examples(self.source, f"train_r{self.round}", _example)[: self.limit]
        if self.eval_source is None and self.source.endswith((".jsonl", ".json")):
            raise TaskError(f"anli: {self.source} is one file and has no test split; set task.eval_source")
        return read_examples(self.eval_source or self.source, f"test_r{self.round}", _example)[: self.limit]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def question(self, example: Example) -> str:
        return self.instruction.replace("{question}", example.question)

    def grade(self, example: Example, text: str) -> Grade:
        return grade_label(text, example.answer, LABELS)


def _example(row: dict, number: int) -> Example:
    """Hub rows have ``premise``, ``hypothesis`` and a label number; local ones ``question`` and ``answer``."""
    name = str(row.get("id") or row.get("uid") or f"anli-{number}")
    if "premise" not in row:
        return Example(name, str(row.get("question") or ""), str(row.get("answer") or ""))
    answer = LABELS[row["label"]] if row.get("label") in (0, 1, 2) else ""
    return Example(name, f"Premise: {row['premise']}\nHypothesis: {row['hypothesis']}", answer)
