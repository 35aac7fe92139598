"""Tiny functions to write, from a few of their values. Nothing is downloaded. Imports no torch."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from maporl.datasets.programs import ProgramTask
from maporl.text import asked_with
from maporl.types import Example
from trl_ext.ppo.options import Natural, Positive, option

_NAME = "f"
_VALUE = re.compile(rf"assert {_NAME}\((\d+)\)==(\d+)")


@dataclass(frozen=True)
class TinyPrograms(ProgramTask):
    """Functions ``f(x) = a*x+b``, of which a question shows values, such as ``f(0)=5,f(1)=9``.

    A coder writes ```` ```def f(x):return 4*x+5``` ````, and a tester an assert for each value. Both are short texts of
    few characters, which a tiny model can learn. A tester is always told all values (``meta.tester_question``), so that
    a coder can learn them from tests that fail.

    Raises:
        ValueError: a number is too small or too large, the share leaves a split empty, or ``instruction`` has no place
            for the question.
    """

    factors: Positive = option(4, "The largest a; the smallest is 1.")
    terms: Natural = option(24, "The largest b; the smallest is 0.")
    shown: Positive = option(2, "Number of values: those of 0, 1 and so on. Two determine the function.")
    told: int | None = option(None, "How many of them the question shows; the others read `f(1)=?`. Default: all.")
    hidden: Positive = option(3, "Number of asserts about the next inputs that grade a program.")
    held_out: float = option(
        0.2,
        "The share of the functions that is the evaluation split. With 0, both splits have all functions. This suits "
        "a coder whose prompt has no values: all questions look the same to it, so that it can remember none.",
    )
    instruction: str = asked_with("{question}")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    def __post_init__(self):
        super().__post_init__()
        if self.told is not None and not 0 <= self.told <= self.shown:
            raise ValueError(f"told: expected 0 to {self.shown}, the number of values that are shown, got {self.told}")
        if self.held_out and not 0 < self._eval_size < self.factors * (self.terms + 1):
            raise ValueError(f"held_out: expected 0, or a share with functions in both splits, got {self.held_out}")

    @property
    def _eval_size(self) -> int:
        return round(self.factors * (self.terms + 1) * self.held_out)

    @cached_property
    def _functions(self) -> list[tuple[int, int]]:
        """The factor and the term of each function of the split."""
        every = list(product(range(1, self.factors + 1), range(self.terms + 1)))
        random.Random(self.seed).shuffle(every)
        if not self.held_out:
            return every
        return every[: self._eval_size] if self.split == "eval" else every[self._eval_size :]

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, index: int) -> Example:
        a, b = self._functions[index]
        name = f"function {index if self.split == 'eval' else self._eval_size + index}"  # which does not tell it
        values = [a * x + b for x in range(self.shown)]
        told = self.shown if self.told is None else self.told
        reference = _program(a, b)
        meta = {
            "entry_point": _NAME,
            "reference": reference,
            "tests": [_assert(x, a * x + b) for x in range(self.shown, self.shown + self.hidden)],
            "setup": "",
            "hidden_setup": "\n".join(_assert(x, value) for x, value in enumerate(values)),
            "tester_question": _shown(values),
            "values": values,
        }
        return Example(name, _shown([*values[:told], *"?" * (self.shown - told)]), reference, meta)

    def question(self, example: Example) -> str:
        """The instruction, with the question in the place of ``{question}``."""
        return self.instruction.replace("{question}", example.question)

    def question_key(self, example: Example) -> str:
        """The question, with the function that tests know, because a question need not tell it."""
        return f"{example.question} {example.meta['reference']}"

    def solution(self, example: Example) -> str:
        """The reference solution as an agent writes it, on one line."""
        return f"```{example.meta['reference']}```"

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The reference solution, or another function of the task."""
        if right:
            return self.solution(example)
        every = [_program(a, b) for a, b in product(range(1, self.factors + 1), range(self.terms + 1))]
        return f"```{rng.choice([program for program in every if program != example.meta['reference']])}```"

    def write_reply(self, example: Example, rng: random.Random, right: bool, role: str | None) -> str:
        """A tester writes the values as asserts. One of them is wrong if the tester is. Others write programs."""
        if role != "tester":
            return self.write_answer(example, rng, right)
        values = list(example.meta["values"])
        if not right:
            place = rng.randrange(len(values))
            most = self.factors * (self.shown - 1) + self.terms
            values[place] = rng.choice([value for value in range(most + 2) if value != values[place]])
        return "\n".join(_assert(x, value) for x, value in enumerate(values))

    def write_agreeing(self, example: Example, rng: random.Random, words: str, role: str | None) -> str:
        """A solver writes a function of the task that passes the asserts in ``words``, or any function if none
        passes."""
        if role == "tester":
            return words
        values = [(int(x), int(value)) for x, value in _VALUE.findall(words)]
        every = list(product(range(1, self.factors + 1), range(self.terms + 1)))
        agreeing = [(a, b) for a, b in every if all(a * x + b == value for x, value in values)]
        return f"```{_program(*rng.choice(agreeing or every))}```"


def _program(a: int, b: int) -> str:
    return f"def {_NAME}(x):return {a}*x+{b}"


def _assert(x: int, value: int) -> str:
    return f"assert {_NAME}({x})=={value}"


def _shown(values: Sequence[int | str]) -> str:
    return ",".join(f"{_NAME}({x})={value}" for x, value in enumerate(values))
