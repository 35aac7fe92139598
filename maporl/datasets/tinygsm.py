"""TinyGSM (Liu et al. 2023, arXiv 2312.09241): grade-school word problems, each labelled by a program."""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from maporl.grading import grade_mathematics
from maporl.sandbox.repeatable import repeatable
from maporl.tasks.base import ReadTask, TaskError, is_file, meta_of, read_rows
from maporl.text import asked_with
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, option

FUNCTION = "simple_math_problem"
"""The function that each program of the data set defines. What it returns is the label."""
_AT_ONCE, _ENDLESS = 100, 50
_LEAST_SECONDS, _SECONDS_EACH = 60.0, 0.05
"""The programs may take so long in all: a minute, and for each that has run ten times what it takes on a slow machine.
"""
_LONGEST_LABEL = 1024
"""The bits of the longest integer that is a label. No longer one is a float's value, and the grader reads none."""
logger = logging.getLogger(__name__)
Numbered = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True)
class TinyGSM(ReadTask):
    """Grade-school word problems, each labelled by a program that runs in the sandbox (TinyGSM).

    What a program's ``simple_math_problem()`` returns is the label, or what its only function returns, if that is a
    whole number. Other rows are dropped and counted in :attr:`dropped`. A held-out question that is also trained on is
    dropped. ``limit`` and ``held_out`` count rows before any is dropped.

    Raises:
        ValueError: an option is outside its range.
        TaskError: at the first use, if the rows cannot be read or too many of them are dropped.
    """

    source: str = option(
        "TinyGSM/TinyGSM",
        "The hub's TinyGSM/TinyGSM, or a .jsonl file of rows with `question` and `code`, which may also be in `meta`.",
    )
    eval_source: str | None = option(
        None,
        "Where the rows of evaluations stand, the first `held_out` of them. Default: in the source, after those of "
        "training.",
    )
    limit: Positive | None = option(100_000, "Number of rows for training, the first ones.")
    held_out: Positive = option(
        1000, "Number of rows for evaluation, the next ones; of a file with fewer rows, the last ones."
    )
    max_dropped: Annotated[float, Ge(0), Lt(1)] = option(
        0.5,
        "The largest share of rows that may be dropped. Language models wrote the programs, and about a quarter of "
        "them give fractions. If more than half of the rows are dropped, they are probably not TinyGSM's.",
    )
    instruction: str = asked_with("{question}\n\nReason briefly, then end with one line: Answer: <number>")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    @property
    def dropped(self) -> dict[str, int]:
        """How many rows of this split were dropped, by reason. The reasons are the sandbox's and this task's own."""
        return self._labelled[1]

    def remark(self) -> str:
        """How many rows were dropped, and why, as a line for people."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items())
        return f"tinygsm: {self.split}: {len(self)} rows, {sum(self.dropped.values())} dropped ({reasons or 'none'})"

    @property
    def _examples(self) -> list[Example]:
        return self._labelled[0]

    @cached_property
    def _labelled(self) -> tuple[list[Example], dict[str, int]]:
        rows, in_training = self._rows()
        examples, dropped = label_rows(rows, in_training)
        if not rows or sum(dropped.values()) > self.max_dropped * len(rows):
            raise TaskError(
                f"tinygsm: {self._where()}: {sum(dropped.values())} of {len(rows)} rows were dropped "
                f"({', '.join(f'{reason} {count}' for reason, count in dropped.items())}), more than "
                f"task.max_dropped={self.max_dropped} allows; expected 'question' and 'code' that defines {FUNCTION}()"
            )
        if not examples:
            raise TaskError(f"tinygsm: {self._where()}: no rows are left for the {self.split} split")
        return examples, dropped

    def _where(self) -> str:
        return self.eval_source if self.split == "eval" and self.eval_source else self.source

    def _rows(self) -> tuple[Numbered, set[str]]:
        """The numbered rows of this split. For the evaluation split, also the questions of the training split."""
        if self.eval_source is not None:
            training = list(enumerate(_read(self.source, self.limit)))
            held_out = list(enumerate(_read(self.eval_source, self.held_out))) if self.split == "eval" else []
        else:
            wanted = None if self.limit is None else self.limit + self.held_out
            rows = list(enumerate(_read(self.source, wanted)))
            if len(rows) <= self.held_out:
                raise TaskError(f"{self.source}: held_out={self.held_out} leaves none of {len(rows)} rows; lower it")
            training, held_out = rows[: -self.held_out], rows[-self.held_out :]
        if self.split == "train":
            return training, set()
        return held_out, {_question(row) for _, row in training}

    def grade(self, example: Example, text: str) -> Grade:
        return grade_mathematics(text, example.answer)


def label_rows(rows: Numbered, known: set[str]) -> tuple[list[Example], dict[str, int]]:
    """(examples, dropped): the examples are labelled by their programs; ``dropped`` counts the other rows by reason.

    A program that reads the clock, or draws numbers without a seed, gives no label (``not_repeatable``).
    ``known`` are questions that the training split has already.
    """
    dropped: Counter[str] = Counter()
    usable = []
    for number, row in rows:
        if reason := _unusable(row, known):
            dropped[reason] += 1
        else:
            usable.append((number, row))
    examples = []
    for (number, row), outcome in zip(usable, _run([_code(row) for _, row in usable]), strict=True):
        answer = whole_number(outcome.value)
        if answer is None:
            dropped["not_integer" if outcome.ok else outcome.reason] += 1
        else:
            examples.append(Example(str(row.get("id", f"tinygsm-{number}")), _question(row), answer))
    for reason, count in dropped.most_common():
        logger.info("tinygsm: %d of %d rows dropped: %s", count, len(rows), reason)
    return examples, dict(dropped.most_common())


def _unusable(row: dict[str, Any], in_training: set[str]) -> str | None:
    """Why a row is dropped before its program runs; None if it is not."""
    if not _question(row):
        return "no_question"
    if _question(row) in in_training:
        return "also_in_training"
    code = _code(row)
    return "not_repeatable" if isinstance(code, str) and not repeatable(code) else None


def _run(codes: list[Any]) -> list[Any]:
    """The sandbox's outcome for each program; raises if so many fail or take long that the rest would take hours."""
    # one that does not end costs the sandbox's whole time limit, and one that crashes a new worker
    from maporl.sandbox.sandbox import Outcome, Sandbox  # every task is imported, and only this one needs the sandbox

    calls: dict[str, list[int]] = {}
    for index, code in enumerate(codes):
        calls.setdefault(labelling_function(code), []).append(index)
    outcomes: dict[int, Outcome] = {}
    endless, crashed, started = 0, 0, time.monotonic()
    with Sandbox() as sandbox:
        for call, same in calls.items():
            for some in (same[start : start + _AT_ONCE] for start in range(0, len(same), _AT_ONCE)):
                fresh = sandbox.run_many([codes[index] for index in some], call)
                outcomes |= zip(some, fresh, strict=True)
                endless += sum(outcome.reason in ("cpu", "timeout") for outcome in fresh)
                crashed += sum(outcome.reason == "killed" for outcome in fresh)
                if endless + crashed > max(_ENDLESS, len(codes) // 100):
                    did = f"{endless} of the first {len(outcomes)} programs did not end within the sandbox's time"
                    crashes = f", and {crashed} crashed" if crashed else ""
                    raise TaskError(
                        f"tinygsm: {did}{crashes}; expected at most {max(_ENDLESS, len(codes) // 100)} of "
                        f"{len(codes)}. Look at the data, or leave such rows out"
                    )
                if (spent := time.monotonic() - started) > _LEAST_SECONDS + _SECONDS_EACH * len(outcomes):
                    raise TaskError(
                        f"tinygsm: the first {len(outcomes)} of {len(codes)} programs took {spent:.0f} seconds; "
                        f"expected at most {_SECONDS_EACH} each. Look at the data, or lower task.limit"
                    )
    return [outcomes[index] for index in range(len(codes))]


def whole_number(value: Any) -> str | None:
    """``value`` as the text of an integer, or None if it is not an integer or longer than any label. It may be
    negative.

    A value that only rounding keeps from an integer counts as that integer: for a program, 1.1 * 50 is
    55.00000000000001.

    >>> whole_number(12), whole_number(-1.0), whole_number(1.1 * 50), whole_number(2.5), whole_number(True)
    ('12', '-1', '55', None, None)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() <= _LONGEST_LABEL else None
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return str(round(value)) if math.isclose(value, round(value), rel_tol=1e-9, abs_tol=1e-9) else None


def _read(source: str, count: int | None) -> Sequence[dict[str, Any]]:
    """The first ``count`` rows, or all. From the hub, no more than these rows are read."""
    if is_file(source):
        return read_rows(source, "train")[:count]
    return read_rows(source, "train" if count is None else f"train[:{count}]")


def labelling_function(code: Any) -> str:
    """The name of the function that returns the label. A program with a single function may give it any name."""
    defined = re.findall(r"^def (\w+)", code, re.MULTILINE) if isinstance(code, str) else []
    return defined[0] if len(defined) == 1 and defined[0].isidentifier() else FUNCTION


def _question(row: dict[str, Any]) -> str:
    question = row.get("question")
    return question.strip() if isinstance(question, str) else ""


def _code(row: dict[str, Any]) -> Any:
    return row.get("code") or meta_of(row).get("code")
