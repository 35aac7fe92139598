"""A word game of a hinter and a guesser, in which the two can learn by different algorithms.

maporl train examples/hint_and_guess/mixed.yaml
maporl compare examples/hint_and_guess/*.yaml --seeds 5 --output runs/hints
"""

import random
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from maporl import Game


@dataclass
class HintAndGuess(Game):
    """Player 0 sees a secret number and says one letter. Player 1 sees the letter and guesses, up to ``guesses`` times.

    Payments: both get the share of the guesses that are left with the right one: 1 for the first guess, 1/3 for the
    last of three, and 0 if none is right. An illegal move pays its author -1.5 and the other nothing.
    """

    interests = "common"
    secrets: Annotated[int, Ge(2), Le(9)] = 6
    guesses: Annotated[int, Ge(1)] = 3
    longest = 4

    def reset(self, rng: random.Random) -> None:
        self.secret = str(rng.randrange(self.secrets) + 1)
        self.hint: str | None = None
        self.guessed: list[str] = []

    def to_move(self) -> tuple[int, ...]:
        if self.hint is None:
            return (0,)
        return () if self.secret in self.guessed or len(self.guessed) == self.guesses else (1,)

    def observe(self, player: int) -> str:
        if player == 0:
            return self.secret
        return f"{self.hint}:{''.join(self.guessed)}"

    def moves(self, player: int) -> tuple[str, ...]:
        return tuple(("abcdefghi" if player == 0 else "123456789")[: self.secrets])

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        ((player, move),) = moves.items()
        if player == 0:
            self.hint = move
            return {}
        self.guessed.append(move)
        if move != self.secret:
            return {}
        left = (self.guesses - len(self.guessed) + 1) / self.guesses
        return {0: left, 1: left}

    def success(self, player: int) -> bool | None:
        return bool(self.guessed) and self.guessed[0] == self.secret
