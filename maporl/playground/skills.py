"""Digits that are to be changed by one of several skills: a task that a team of specialists solves only by
listening."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Ge, Le

from maporl.grading import final_answer
from maporl.tasks.base import Task
from maporl.tasks.lessons import Lessons
from maporl.types import Example, Grade
from trl_ext.ppo.options import ProperShare, must_be_different, option

Skill = Literal["next", "reversed", "previous"]


def _shifted(digits: str, by: int) -> str:
    return "".join(str((int(digit) + by) % 10) for digit in digits)


SKILLS: dict[str, tuple[str, Callable[[str], str]]] = {
    "next": ("+", lambda digits: _shifted(digits, 1)),
    "reversed": ("*", lambda digits: digits[::-1]),
    "previous": ("-", lambda digits: _shifted(digits, -1)),
}
"""The sign that asks for each skill, and what the skill makes of digits."""


@dataclass(frozen=True)
class Skills(Lessons, Task):
    """Questions of digits and a sign. The sign says which skill is asked for, and no two skills ever agree.

    ``472+`` asks for the ``next`` of every digit (583, where 0 follows 9), ``472*`` for the digits ``reversed`` (274)
    and ``472-`` for the ``previous`` of every digit (361). Every number is asked once with each of the ``skills``.

    An agent that knows one of two skills is right on half of the questions. The world exists to show what talking alone
    is worth, because a warm start can teach each agent a different skill (``warm_start.agents``).

    Raises:
        ValueError: a skill is given twice or none is given, ``digits`` is not between 2 and 5, or the share is not
            between 0 and 1.
    """

    skills: tuple[Skill, ...] = option(
        ("next", "reversed"), "The skills that are asked for: next, reversed and previous.", must=must_be_different
    )
    digits: Annotated[int, Ge(2), Le(5)] = option(3, "Number of digits.")
    held_out: ProperShare = option(
        0.2, "The share of the numbers that is the evaluation split, with all of their questions."
    )
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    answer_form = "Answer: <digits>"

    @cached_property
    def _questions(self) -> list[tuple[str, Skill]]:
        numbers = [f"{n:0{self.digits}d}" for n in range(10**self.digits)]
        rng = random.Random(self.seed)
        rng.shuffle(numbers)
        cut = max(1, round(len(numbers) * self.held_out))
        selected = numbers[:cut] if self.split == "eval" else numbers[cut:]
        questions = [(number, skill) for number in selected for skill in self.skills]
        rng.shuffle(questions)
        return questions

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Example:
        digits, skill = self._questions[index]
        sign, rule = SKILLS[skill]
        return Example(digits + sign, digits + sign, rule(digits), {"skill": skill})

    def grade(self, example: Example, text: str) -> Grade:
        """Right if the final answer of ``text`` is the label.

        A final answer with more or fewer digits cannot be read.
        """
        answer = final_answer(text)
        if answer is None or len(answer) != self.digits or not (answer.isascii() and answer.isdigit()):
            return Grade(None, False, f"no {self.digits} digits as final answer")
        correct = answer == example.answer
        return Grade(answer, correct, "equals the label" if correct else "differs from the label")

    def solution(self, example: Example) -> str:
        """The digits alone."""
        return example.answer

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The label, or random other digits, for warm starts."""
        if right:
            return example.answer
        other = rng.randrange(10**self.digits - 1)
        return f"{other + (other >= int(example.answer)):0{self.digits}d}"  # every number but the right one

    def write_by_skill(self, example: Example, skill: str) -> str:
        """The answer of a student that takes every question for one that asks for ``skill``."""
        _, rule = SKILLS[skill]
        return rule(example.id[: self.digits])
