"""Questions of several parts, each of which asks for a skill: what an orchestrator can share out to specialists."""

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from maporl.playground.skills import SKILLS, Skill
from maporl.tasks.base import Task
from maporl.tasks.lessons import Lessons
from maporl.types import Call, Example, Grade
from trl_ext.ppo.options import Positive, must_be_different, option

TRIES = 20
"""How often a held-out question is drawn again that is also a training question. There may be no others."""


@dataclass(frozen=True)
class Parts(Lessons, Task):
    """Questions such as ``47+36*``: each part is digits and a sign, which asks for a skill (:class:`Skills`).

    ``47+36*`` asks for the ``next`` of every digit of 47, and for 36 ``reversed``. The answer is ``58 63``. A
    question that is trained on is not held out, as long as there are others.

    For warm starts, the task writes calls of agents that are named after their skills (``ask_next``), one for each
    part.

    Raises:
        ValueError: a skill is given twice or none is given, ``digits`` is not between 2 and 5, ``parts`` is not between
            2 and 9, or ``size`` is below 1.
    """

    skills: tuple[Skill, ...] = option(
        ("next", "reversed"), "The skills that are asked for: next, reversed and previous.", must=must_be_different
    )
    digits: Annotated[int, Ge(2), Le(5)] = option(2, "Number of digits of a part.")
    parts: Annotated[int, Ge(2), Le(9)] = option(2, "Number of parts, no two of which have the same digits.")
    size: Positive = option(4096, "Number of questions of a split.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    name = "toy_parts"
    answer_form = "<digits> <digits>"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    @cached_property
    def _examples(self) -> list[Example]:
        rng = random.Random(f"{self.split} {self.seed}")
        trained = {example.question for example in replace(self, split="train")} if self.split == "eval" else ()
        examples = []
        for number in range(self.size):
            examples.append(self._drawn(rng, number))
            for _ in range(TRIES):
                if examples[-1].question in trained:
                    examples[-1] = self._drawn(rng, number)
        return examples

    def _drawn(self, rng: random.Random, number: int) -> Example:
        numbers = rng.sample(range(10**self.digits), self.parts)
        skills = [rng.choice(self.skills) for _ in numbers]
        return _example(f"parts-{number}", [(f"{n:0{self.digits}d}", s) for n, s in zip(numbers, skills, strict=True)])

    def grade(self, example: Example, text: str) -> Grade:
        """Right if the numbers in ``text`` are those of the label, in their order."""
        answer = " ".join(re.findall(r"(?<!\d)\d+(?!\d)", text, re.ASCII))
        if not answer:
            return Grade(None, False, "no number")
        correct = answer == example.answer
        return Grade(answer, correct, "equals the label" if correct else "differs from the label")

    def solution(self, example: Example) -> str:
        """The numbers alone."""
        return example.answer

    def part(self, example: Example, asked: str, role: str | None) -> Example:
        """The parts that an agent is asked for."""
        return _example(example.id, _parts_in(asked)) if _parts_in(asked) else example

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The label, or random other numbers, for warm starts."""
        answer = example.answer
        while (answer == example.answer) != right:
            answer = " ".join(f"{rng.randrange(10**self.digits):0{self.digits}d}" for _ in _parts_in(example.question))
        return answer

    def write_by_skill(self, example: Example, skill: str) -> str:
        """The answer of a student that takes every part for one that asks for ``skill``."""
        return " ".join(SKILLS[skill][1](digits) for digits, _ in _parts_in(example.question))

    def write_calls(
        self, example: Example, tools: Collection[str], made: Sequence[Call] = ()
    ) -> list[tuple[str, dict[str, Any]]]:
        """A question for each part that is left, to the agent that is named after its skill."""
        left = _parts_in(example.question)[len(made) :]
        calls = [(f"ask_{skill}", {"question": digits + SKILLS[skill][0]}) for digits, skill in left]
        return [call for call in calls if call[0] in tools]


_SIGNS = {sign: skill for skill, (sign, _) in SKILLS.items()}


def _parts_in(text: str) -> list[tuple[str, str]]:
    """Return the digits and the skill of each part."""
    return [(digits, _SIGNS[sign]) for digits, sign in re.findall(r"(\d+)([+*-])", text, re.ASCII)]


def _example(name: str, parts: Sequence[tuple[str, str]]) -> Example:
    question = "".join(digits + SKILLS[skill][0] for digits, skill in parts)
    answer = " ".join(SKILLS[skill][1](digits) for digits, skill in parts)
    return Example(name, question, answer, {"skills": [skill for _, skill in parts]})
