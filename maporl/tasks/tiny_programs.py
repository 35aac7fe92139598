"""Tiny functions to write, from a few of their values. Nothing is downloaded. Imports no torch."""

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Literal

from maporl.tasks.programs import ProgramTask
from maporl.types import Example

_NAME = "f"


@dataclass(frozen=True)
class TinyPrograms(ProgramTask):
    """Functions ``f(x) = a*x+b``, of which a question shows ``shown`` values, such as ``f(1)=5,f(4)=11``.

    ``a`` is 1 to ``factors``, ``b`` is 0 to ``terms``, and ``x`` is 0 to ``inputs``. Two values determine the function.
    ``hidden`` asserts about other inputs grade a program, and are drawn for each question.

    The questions are all functions with all choices of inputs, in a seeded order. The share ``held_out`` of them is the
    evaluation split. Its functions stand in the training split too, but with other values shown.

    A coder writes ```` ```def f(x):return 2*x+3``` ````, and a tester an assert for each value that the question shows.
    Both are short texts of few characters, which a tiny model can learn.

    Raises:
        ValueError: a number is too small, too few inputs are left for the hidden tests, the share is not between 0 and 1,
            or ``instruction`` has no place for the question.
    """

    factors: int = 4
    terms: int = 9
    inputs: int = 9
    shown: int = 2
    hidden: int = 3
    held_out: float = 0.2
    instruction: str = "{question}"
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("factors", 1), ("terms", 0), ("shown", 1), ("hidden", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.inputs + 1 < self.shown + self.hidden:
            raise ValueError(
                f"inputs: expected at least {self.shown + self.hidden - 1}, because {self.shown} values are shown and "
                f"{self.hidden} others tested, got {self.inputs}"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: expected a share between 0 and 1, got {self.held_out}")
        if "{question}" not in self.instruction:
            raise ValueError("instruction: expected the text to contain {question}")

    @cached_property
    def _questions(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """The factor, the term and the shown inputs of each question of the split."""
        shown = combinations(range(self.inputs + 1), self.shown)
        every = list(product(range(1, self.factors + 1), range(self.terms + 1), shown))
        random.Random(self.seed).shuffle(every)
        first = max(1, round(len(every) * self.held_out))
        return every[:first] if self.split == "eval" else every[first:]

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Example:
        a, b, inputs = self._questions[index]
        name = f"{a}x+{b} at {','.join(map(str, inputs))}"
        others = [x for x in range(self.inputs + 1) if x not in inputs]
        tested = random.Random(f"{self.seed} {name}").sample(others, self.hidden)
        reference = _program(a, b)
        meta = {
            "entry_point": _NAME,
            "reference": reference,
            "tests": [_assert(x, a * x + b) for x in tested],
            "setup": "",
            "shown": [[x, a * x + b] for x in inputs],
        }
        return Example(name, ",".join(f"{_NAME}({x})={y}" for x, y in meta["shown"]), reference, meta)

    def question(self, example: Example) -> str:
        """The instruction, with the question in the place of ``{question}``."""
        return self.instruction.replace("{question}", example.question)

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
        """A tester writes the shown values as asserts, of which a wrong one expects another value. Others write programs."""
        if role != "tester":
            return self.write_answer(example, rng, right)
        values = example.meta["shown"]
        most = self.factors * self.inputs + self.terms
        wrong = None if right else rng.randrange(len(values))
        expected = [
            y if number != wrong else rng.choice([n for n in range(most + 1) if n != y])
            for number, (_, y) in enumerate(values)
        ]
        return "\n".join(_assert(x, y) for (x, _), y in zip(values, expected, strict=True))


def _program(a: int, b: int) -> str:
    return f"def {_NAME}(x):return {a}*x+{b}"


def _assert(x: int, y: int) -> str:
    return f"assert {_NAME}({x})=={y}"
