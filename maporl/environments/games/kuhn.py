"""Kuhn poker (1950): three cards and one bet.

Its equilibrium is known exactly: the first player loses 1/18 a game.
"""

import random
from dataclasses import dataclass

from maporl.environments.games.base import Game


@dataclass
class KuhnPoker(Game):
    """Each of two players puts in 1 and gets a card: J, Q or K. In turn they say ``p`` (pass) or ``b`` (bet 1).

    After two passes or two bets, the higher card takes the pot. A pass after a bet folds.

    Payments: only the last move of a game pays. Each player gets what it won or lost, times ``scale``. After an illegal
    move its author gets -1.5 and the other 0.5, as in SPIRAL.
    """

    scale: float = 1.0
    interests = "opposed"
    longest = 2

    def reset(self, rng: random.Random) -> None:
        self.cards = rng.sample("JQK", 2)
        self.history = ""
        self.won = 0.0

    def to_move(self) -> tuple[int, ...]:
        return () if self.history in ("pp", "bp", "bb", "pbp", "pbb") else (len(self.history) % 2,)

    def observe(self, player: int) -> str:
        return f"{self.cards[player]} {self.history}".rstrip()

    def moves(self, player: int) -> tuple[str, ...]:
        return ("p", "b")

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        (move,) = moves.values()
        self.history += move
        if self.to_move():
            return {}
        higher = 1.0 if "JQK".index(self.cards[0]) > "JQK".index(self.cards[1]) else -1.0
        self.won = {"pp": higher, "bp": 1.0, "bb": 2 * higher, "pbp": -1.0, "pbb": 2 * higher}[self.history]
        return {0: self.scale * self.won, 1: -self.scale * self.won}

    def success(self, player: int) -> bool | None:
        return self.won > 0 if player == 0 else self.won < 0
