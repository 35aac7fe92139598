"""Kuhn poker (1950): three cards and one bet.

The equilibrium of one round is known exactly: the first player loses 1/18.
"""

import random
from dataclasses import dataclass
from typing import Literal

from maporl.environments.games.base import Game
from trl_ext.ppo.options import Positive, option

OVER = ("pp", "bp", "bb", "pbp", "pbb")
"""The moves of a round that end it."""


@dataclass
class KuhnPoker(Game):
    """Each of two players puts in 1 and gets a card: J, Q or K. In turn they say ``p`` (pass) or ``b`` (bet 1).

    After two passes or two bets, the higher card takes the pot. A pass after a bet folds. A game has so many
    ``rounds``, each with new cards, and the players begin them in turn. With several rounds a player also sees the
    number of the round and its own chips.

    Payments: with ``pays: chips`` the last move of a round pays each player what it won or lost, times ``scale``. With
    ``pays: winner`` the last move of the game pays ``scale`` to the player with more chips and minus ``scale`` to the
    other, and 0 to both if they have the same. After an illegal move its author gets -1.5 and the other 0.5, as in
    SPIRAL.

    Raises:
        ValueError: ``rounds`` is below 1.
    """

    scale: float = option(1.0, "What the payments are multiplied by.")
    rounds: Positive = option(1, "Number of rounds.")
    pays: Literal["chips", "winner"] = option(
        "chips", "chips: each round pays. winner: the last move of the game pays."
    )
    interests = "opposed"

    @property
    def longest(self) -> int:  # type: ignore[override]
        """Each player speaks at most twice in a round."""
        return 2 * self.rounds

    def reset(self, rng: random.Random) -> None:
        self.dealt = [rng.sample("JQK", 2) for _ in range(self.rounds)]
        self.chips = [0, 0]
        self.number = 0
        self._begin_round()

    def _begin_round(self) -> None:
        self.cards, self.history = self.dealt[self.number], ""

    def to_move(self) -> tuple[int, ...]:
        return () if self.history in OVER else ((self.number + len(self.history)) % 2,)

    def observe(self, player: int) -> str:
        seen = f"{self.cards[player]} {self.history}".rstrip()
        return seen if self.rounds == 1 else f"{self.number + 1}/{self.rounds} {self.chips[player]:+d} {seen}"

    def moves(self, player: int) -> tuple[str, ...]:
        return ("p", "b")

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        (move,) = moves.values()
        self.history += move
        if self.history not in OVER:
            return {}
        first = self.number % 2
        other = 1 - first
        higher = 1 if "JQK".index(self.cards[first]) > "JQK".index(self.cards[other]) else -1
        won = {"pp": higher, "bp": 1, "bb": 2 * higher, "pbp": -1, "pbb": 2 * higher}[self.history]
        self.chips[first] += won
        self.chips[other] -= won
        last = self.number + 1 == self.rounds
        if not last:
            self.number += 1
            self._begin_round()
        if self.pays == "chips":
            return {first: self.scale * won, other: -self.scale * won}
        return {player: self.scale * self._sign(player) for player in (0, 1)} if last else {}

    def _sign(self, player: int) -> int:
        return (self.chips[player] > 0) - (self.chips[player] < 0)

    def success(self, player: int) -> bool | None:
        return self.chips[player] > 0
