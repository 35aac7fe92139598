"""Tic-tac-toe."""

import random
from dataclasses import dataclass

from maporl.environments.games.base import Game
from trl_ext.ppo.options import option

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@dataclass
class TicTacToe(Game):
    """The first player plays X and the other O. Cells are numbered 1 to 9 by rows.

    Payments: only the last move of a game pays. The winner gets 1 and the loser -1, or each gets ``draw``. After an
    illegal move its author gets -1.5 and the other 0.5, as in SPIRAL.
    """

    draw: float = option(0.0, "What each player gets for a draw.")
    random_opening: int = option(0, "Number of random moves before the first player's, rounded down to an even number.")
    interests = "opposed"
    longest = 5

    def reset(self, rng: random.Random) -> None:
        self.board = ["_"] * 9
        for _ in range(2 * (self.random_opening // 2)):
            free = [i for i in range(9) if self.board[i] == "_" and not self._wins_at(i)]
            self.board[rng.choice(free)] = self._mark()

    def _mark(self) -> str:
        return "XO"[9 - self.board.count("_") & 1]

    def _wins_at(self, cell: int) -> bool:
        mark = self._mark()
        return any(cell in line and all(self.board[i] == mark for i in line if i != cell) for line in LINES)

    def winner(self) -> str | None:
        """The mark of the player who has won, or None."""
        return next(
            (self.board[a] for a, b, c in LINES if self.board[a] == self.board[b] == self.board[c] != "_"), None
        )

    def to_move(self) -> tuple[int, ...]:
        if self.winner() is not None or "_" not in self.board:
            return ()
        return ("XO".index(self._mark()),)

    def observe(self, player: int) -> str:
        rows = "/".join("".join(self.board[i : i + 3]) for i in (0, 3, 6))
        return f"{'XO'[player]} {rows}"

    def moves(self, player: int) -> tuple[str, ...]:
        return tuple(str(i + 1) for i, cell in enumerate(self.board) if cell == "_")

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        ((player, move),) = moves.items()
        self.board[int(move) - 1] = "XO"[player]
        if self.winner() is not None:
            return {player: 1.0, 1 - player: -1.0}
        return {} if "_" in self.board else {0: self.draw, 1: self.draw}

    def success(self, player: int) -> bool | None:
        return self.winner() == "XO"[player]
