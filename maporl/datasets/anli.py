"""Adversarial NLI (Nie et al. 2020, arXiv 1910.14599): does a premise entail, contradict or leave open a hypothesis?"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from maporl.grading import grade_label
from maporl.tasks.base import ReadTask, is_file, read_examples, source_of, text_of
from maporl.text import asked_with
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, must_be_different, option

LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class ANLI(ReadTask):
    """A premise entails a hypothesis, contradicts it, or leaves it open (Adversarial NLI).

    Raises:
        ValueError: ``round`` names no round, or one round twice.
    """

    source: str = option(
        "facebook/anli",
        "The hub's facebook/anli, or a .jsonl file. A file whose name has {round} in it, as in "
        "`anli_r{round}/train.jsonl`, is read once for each round; any other file is read once.",
    )
    eval_source: str | None = option(
        None, "What evaluations ask, in the same form. Default: the test splits of the data set on the hub."
    )
    round: Literal[1, 2, 3, "all"] | tuple[Literal[1, 2, 3], ...] = option(
        3, "The round: 1, 2 or 3, a list of them, or all."
    )
    limit: Positive | None = option(None, "Take the first rows of each round only, so many.")
    instruction: str = asked_with(
        "{question}\n\nDoes the premise entail the hypothesis (entailment), contradict it (contradiction), or neither "
        "(neutral)? Reason briefly, then end with one line: Answer: <entailment, neutral or contradiction>"
    )
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    def __post_init__(self):
        super().__post_init__()
        must_be_different("round", self._rounds)

    @property
    def _rounds(self) -> tuple[int, ...]:
        if self.round == "all":
            return (1, 2, 3)
        return (self.round,) if isinstance(self.round, int) else self.round

    @cached_property
    def _examples(self) -> list[Example]:
        source, part = source_of(self), "train" if self.split == "train" else "test"
        # nothing tells which rounds a file without {round} in its name holds: it is read once
        rounds = self._rounds if "{round}" in source or not is_file(source) else self._rounds[:1]
        return [
            example
            for number in rounds
            for example in read_examples(source.replace("{round}", str(number)), f"{part}_r{number}", _example)[
                : self.limit
            ]
        ]

    answer_form = "Answer: <entailment, neutral or contradiction>"

    def grade(self, example: Example, text: str) -> Grade:
        return grade_label(text, example.answer, LABELS)


def _example(row: dict, number: int) -> Example:
    """The example in a row: of the hub (``premise``, ``hypothesis``, ``label``) or local (``question``, ``answer``)."""
    name = str(row.get("id") or row.get("uid") or f"anli-{number}")
    value = row.get("answer" if "premise" not in row else "label")
    written = "" if value is None else str(value)
    answer = {str(place): label for place, label in enumerate(LABELS)}.get(written, written)
    if answer.strip() and answer not in LABELS:
        raise ValueError(f"({name}) has the label {value!r}; expected {', '.join(LABELS)}, or 0, 1, 2 in this order")
    if "premise" in row and "hypothesis" not in row:
        raise ValueError(f"({name}) has 'premise' but no 'hypothesis'")
    if "premise" not in row:
        return Example(name, text_of(row.get("question"), "question"), answer)
    premise, hypothesis = (text_of(row[part], part) for part in ("premise", "hypothesis"))
    return Example(name, f"Premise: {premise}\nHypothesis: {hypothesis}", answer)
