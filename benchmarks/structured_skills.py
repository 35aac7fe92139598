"""The quickstart's task with answers in JSON, which its warm start teaches."""

import json
import random
from dataclasses import dataclass

from maporl.playground.skills import Skills
from maporl.types import Example, Grade


def _written(digits: str) -> str:
    return json.dumps({"a": digits}, separators=(",", ":"))


@dataclass(frozen=True)
class JsonSkills(Skills):
    """Answers are ``{"a":"583"}``."""

    def grade(self, example: Example, text: str) -> Grade:
        try:
            digits = str(json.loads(text)["a"])
        except (ValueError, KeyError, TypeError):
            digits = text
        return super().grade(example, digits)

    def solution(self, example: Example) -> str:
        return _written(super().solution(example))

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        return _written(super().write_answer(example, rng, right))

    def write_by_skill(self, example: Example, skill: str) -> str:
        return _written(super().write_by_skill(example, skill))
