"""A word game of a hinter and a guesser, in which the two can learn by different algorithms.

maporl train examples/hint_and_guess/mixed.yaml
maporl compare examples/hint_and_guess/mixed.yaml examples/hint_and_guess/both_*.yaml --output runs/hints
"""

import itertools
import random
from dataclasses import dataclass

from maporl import Game

NUMBERS, LETTERS = "123456", "abcdef"
GUESSES = tuple(map("".join, itertools.permutations(NUMBERS, 3)))


@dataclass
class HintAndGuess(Game):
    """Player 0 sees a secret number from 1 to 6 and says a letter. Player 1 sees the letter and says three different
    numbers, which are its guesses in order.

    Payments: both get the share of the guesses that are left with the right one: 1 where it is the first, 2/3 where it
    is the second, 1/3 where it is the third, and else 0. An illegal move pays its author -1.5 and the other nothing.

    A warm start teaches the guesser half of a code: 1 is among its guesses where it hears a, 2 where it hears b, and so
    on, in any place. It teaches the hinter any letter. So both have something to learn: what to say, and what to guess
    first.
    """

    interests = "common"
    longest = 1

    def reset(self, rng: random.Random) -> None:
        self.secret = rng.choice(NUMBERS)
        self.hint: str | None = None
        self.guesses: str | None = None

    def to_move(self) -> tuple[int, ...]:
        if self.hint is None:
            return (0,)
        return (1,) if self.guesses is None else ()

    def observe(self, player: int) -> str:
        return self.secret if player == 0 else str(self.hint)

    def moves(self, player: int) -> tuple[str, ...]:
        return tuple(LETTERS) if player == 0 else GUESSES

    def taught(self, player: int) -> tuple[str, ...]:
        if player == 0:
            return self.moves(player)
        number = NUMBERS[LETTERS.index(str(self.hint))]
        return tuple(guess for guess in GUESSES if number in guess)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        ((player, move),) = moves.items()
        if player == 0:
            self.hint = move
            return {}
        self.guesses = move
        left = (3 - move.index(self.secret)) / 3 if self.secret in move else 0.0
        return {0: left, 1: left}

    def success(self, player: int) -> bool | None:
        return self.guesses is not None and self.guesses[0] == self.secret
