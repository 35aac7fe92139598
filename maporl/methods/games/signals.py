"""A signalling game (Lewis 1969): one player sees the state and can only signal; the other sees the signal and acts."""

import random
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Annotated

from annotated_types import Ge, Le

from maporl.environments.games.base import Game
from trl_ext.ppo.options import option


@dataclass
class CodeGame(Game):
    """A game whose players win by agreeing on a code: a letter for each of the numbers from 1 to ``states``.

    Raises:
        ValueError: ``states`` is outside 2 to 9.
    """

    interests = "common"
    states: Annotated[int, Ge(2), Le(9)] = option(4, "Number of numbers and letters, from 2 to 9.")


@dataclass
class Signals(CodeGame):
    """Player 0 sees one of ``states`` numbers and says one of as many letters. Player 1 sees the letter and guesses the
    number.

    Payments: the guess pays. Both get 1 if it is right, and 0 if it is wrong. An illegal move pays its author -1.5 and
    the other nothing.

    With ``code`` a warm start teaches player 1 to take ``a`` for 1, ``b`` for 2 and so on, and player 0 nothing. So a
    signal has a worth from the beginning.

    Raises:
        ValueError: ``states`` is outside 2 to 9.
    """

    code: bool = option(
        False,
        "Let a warm start teach player 1 to take `a` for 1, `b` for 2 and so on, and player 0 nothing, so that a "
        "signal has a worth from the beginning.",
    )
    longest = 1

    def reset(self, rng: random.Random) -> None:
        self.state = rng.randrange(self.states)
        self.signal: str | None = None
        self.guess: str | None = None

    def to_move(self) -> tuple[int, ...]:
        if self.signal is None:
            return (0,)
        return (1,) if self.guess is None else ()

    def observe(self, player: int) -> str:
        return str(self.state + 1) if player == 0 else str(self.signal)

    def moves(self, player: int) -> tuple[str, ...]:
        names = "abcdefghi" if player == 0 else "123456789"
        return tuple(names[: self.states])

    def taught(self, player: int) -> tuple[str, ...]:
        """Any legal move, or with ``code`` the number that the guesser's code has for the letter."""
        if self.code and player == 1:
            return (str(ascii_lowercase.index(str(self.signal)) + 1),)
        return self.moves(player)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        ((player, move),) = moves.items()
        if player == 0:
            self.signal = move
            return {}
        self.guess = move
        right = float(self.guess == str(self.state + 1))
        return {0: right, 1: right}

    def success(self, player: int) -> bool | None:
        return self.guess == str(self.state + 1)
