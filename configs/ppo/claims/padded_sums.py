"""The task of two_rewards.yaml."""

import random
from dataclasses import dataclass

from maporl import Arithmetic
from maporl.types import Example


@dataclass(frozen=True)
class PaddedSums(Arithmetic):
    """Sums whose warm start writes up to ``padding`` semicolons before a number, so that right answers differ in
    length."""

    padding: int = 5

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The sum, or another number, after 0 to ``padding`` semicolons."""
        return ";" * rng.randint(0, self.padding) + super().write_answer(example, rng, right)
