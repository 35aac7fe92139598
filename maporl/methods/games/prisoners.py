"""The iterated prisoner's dilemma, in which both players move at once."""

import random
from dataclasses import dataclass

from maporl.environments.games.base import Game
from trl_ext.ppo.options import AboveZero, Natural, Positive, option

PAYOFF = {("A", "A"): (3.0, 3.0), ("A", "B"): (0.0, 5.0), ("B", "A"): (5.0, 0.0), ("B", "B"): (1.0, 1.0)}


@dataclass
class PrisonersDilemma(Game):
    """``A`` cooperates and ``B`` defects. A player is shown the last ``memory`` rounds as pairs of moves, its own
    first.

    Payments: every round pays both. Two who cooperate get 3 each, and two who defect get 1 each. A player who defects
    alone gets 5, and the other 0. These numbers are divided by ``divide``. An illegal move pays its author -1.5 and the
    other nothing.

    Raises:
        ValueError: an option is outside its range.
    """

    interests = "mixed"
    pays_every_move = True
    rounds: Positive = option(10, "Number of rounds.")
    divide: AboveZero = option(5.0, "What the payments are divided by.")
    memory: Natural = option(1, "Number of earlier rounds that a player is shown.")

    @property
    def longest(self) -> int:  # type: ignore[override]
        """A player moves once in each round."""
        return self.rounds

    def reset(self, rng: random.Random) -> None:
        self.played: list[tuple[str, str]] = []

    def to_move(self) -> tuple[int, ...]:
        return (0, 1) if len(self.played) < self.rounds else ()

    def observe(self, player: int) -> str:
        shown = self.played[len(self.played) - min(self.memory, len(self.played)) :]
        return " ".join(pair[player] + pair[1 - player] for pair in shown) or "-"

    def moves(self, player: int) -> tuple[str, ...]:
        return ("A", "B")

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        pair = (moves[0], moves[1])
        self.played.append(pair)
        return {player: PAYOFF[pair][player] / self.divide for player in (0, 1)}

    def success(self, player: int) -> bool | None:
        """Whether both cooperated in the last round."""
        return bool(self.played) and self.played[-1] == ("A", "A")
