"""Sums and products with exact labels. Nothing is downloaded, and training never sees the held-out part."""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from typing import Any, Literal

from maporl.grading import canonical, final_answer, number
from maporl.tasks.base import Task
from maporl.tasks.lessons import Lessons
from maporl.text import text_option
from maporl.types import Call, Example, Grade
from trl_ext.ppo.options import Natural, ProperShare, option

_SYMBOL = {"sum": "+", "times": "*"}


@dataclass(frozen=True)
class Arithmetic(Lessons, Task):
    """All pairs of operands ``smallest .. largest``, in a seeded order. The share ``held_out`` is the evaluation split.

    Addition and multiplication commute, so a pair is held out in both orders or in none: if ``3+4`` is held out,
    training never sees ``4+3``.

    A sum has the skill ``digitwise``, for warm starts: a student that adds each pair of digits by itself and forgets
    the carry. It is right on ``47+30`` (77) and wrong on ``47+35`` (72).

    Raises:
        ValueError: the range holds fewer than two operands, a share is not between 0 and 1, the template lacks an
            operand, or ``easy`` is given for products or leaves a split empty.
    """

    operation: Literal["sum", "times"] = option("sum", "What is asked for: the sum, or the product (times).")
    smallest: Natural = option(0, "The smallest operand.")
    largest: Natural = option(49, "The largest operand.")
    held_out: ProperShare = option(0.2, "The share of the pairs that is the evaluation split.")
    template: str = text_option("{a}{op}{b}=", "The text of a question, with {a!} and {b!}, and perhaps {op}.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")
    easy: ProperShare | None = option(
        None,
        "The share of questions whose second operand is a multiple of ten, such as `47+30`. In all others a digit is "
        "carried from the ones, as in `47+35`. As many questions are left out as this share needs. None: all pairs "
        "are asked.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.smallest >= self.largest:
            raise ValueError(f"largest: expected more than smallest={self.smallest}, got {self.largest}")
        self._check_easy()

    def _check_easy(self) -> None:
        if self.easy is None:
            return
        if self.operation != "sum":
            raise ValueError(f"easy: it is a share of sums, got {self.easy} of {self.operation}; remove it")
        if not self._pairs:
            raise ValueError(f"easy: no pair of {self.smallest} to {self.largest} is left in the {self.split} split")

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        operands = range(self.smallest, self.largest + 1)
        pairs = list(product(operands, operands))
        random.Random(self.seed).shuffle(pairs)
        held_out = self._held_out(pairs)
        pairs = [pair for pair in pairs if (pair in held_out) == (self.split == "eval")]
        if self.easy is None:
            return pairs
        easy = [(a, b) for a, b in pairs if b % 10 == 0]
        hard = [(a, b) for a, b in pairs if a % 10 + b % 10 >= 10]
        size = math.floor(min(len(easy) / self.easy, len(hard) / (1 - self.easy)))
        chosen = {*easy[: round(size * self.easy)], *hard[: size - round(size * self.easy)]}
        return [pair for pair in pairs if pair in chosen]

    def _held_out(self, pairs: list[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return the held-out pairs, each with its mirror image: the first of ``pairs`` that fit the share."""
        wanted = max(1, round(len(pairs) * self.held_out))
        held_out: set[tuple[int, int]] = set()
        for a, b in pairs:
            both = {(a, b), (b, a)}
            if len(held_out | both) <= wanted:
                held_out |= both
        return held_out

    answer_form = "Answer: <number>"

    @property
    def skills(self) -> tuple[str, ...]:  # type: ignore[override]  # it follows from the operation
        """The skill of which a pupil of sums can be taught nothing else."""
        return ("digitwise",) if self.operation == "sum" else ()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Example:
        a, b = self._pairs[index]
        answer = a + b if self.operation == "sum" else a * b
        question = self.template.format(a=a, b=b, op=_SYMBOL[self.operation])
        return Example(f"{a}{_SYMBOL[self.operation]}{b}", question, str(answer))

    def grade(self, example: Example, text: str) -> Grade:
        """Right if the final answer of ``text`` is the number. A text without a final answer is wrong."""
        answer = final_answer(text)
        if answer is None or number(answer) is None:
            return Grade(None, False, "no number as final answer")
        correct = canonical(answer) == example.answer
        return Grade(canonical(answer), correct, "equals the label" if correct else "differs from the label")

    def solution(self, example: Example) -> str:
        """The number alone."""
        return example.answer

    def write_calls(
        self, example: Example, tools: Collection[str], made: Sequence[Call] = ()
    ) -> list[tuple[str, dict[str, Any]]]:
        """A call of the tool ``add`` or ``multiply``, or of a ``calculator``, if the agent has one."""
        if made:
            return []
        a, b = map(int, example.id.split(_SYMBOL[self.operation]))
        name = {"sum": "add", "times": "multiply"}[self.operation]
        if name in tools:
            return [(name, {"a": a, "b": b})]
        return [("calculator", {"expression": f"{a}{_SYMBOL[self.operation]}{b}"})] if "calculator" in tools else []

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The sum or product, or a random other number of the same range, for warm starts."""
        truth = int(example.answer)
        if right:
            return str(truth)
        largest = 2 * self.largest if self.operation == "sum" else self.largest**2
        return str(rng.choice([n for n in range(largest + 1) if n != truth]))

    def write_by_skill(self, example: Example, skill: str) -> str:
        """The sums of the pairs of digits, side by side, without what is carried.

        Raises:
            NotImplementedError: the questions are products.
        """
        if skill not in self.skills:
            return super().write_by_skill(example, skill)
        a, b = (number[::-1] for number in example.id.split(_SYMBOL[self.operation]))
        *lower, highest = (int(x) + int(y) for x, y in zip_longest(a, b, fillvalue="0"))
        return str(highest) + "".join(str(digit % 10) for digit in reversed(lower))
