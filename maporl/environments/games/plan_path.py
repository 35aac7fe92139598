"""Plan-path: two players walk one token through a grid to its goal, taking turns (after AT-GRPO's planning tasks)."""

import random
from collections import deque
from dataclasses import dataclass

from maporl.environments.games.base import Game

STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


@dataclass
class PlanPath(Game):
    """A ``size`` x ``size`` grid with ``walls`` walls; the goal can be reached in ``limit`` moves.

    Both players are paid 1 when the token arrives. For each move they are paid ``progress`` if it brought the token a
    step nearer to the goal, and minus ``progress`` if a step farther. A player sees the rows of the grid: ``A`` is the
    token, ``G`` the goal, ``#`` a wall and ``_`` free. A move into a wall or off the grid leaves the token in its place.

    Raises:
        ValueError: an option is outside its range.
    """

    size: int = 4
    walls: int = 2
    limit: int = 6
    progress: float = 0.1

    def __post_init__(self):
        if self.size < 2 or self.limit < 1 or not 0 <= self.walls <= self.size**2 - 2:
            raise ValueError(
                f"expected size >= 2, limit >= 1 and at most size^2 - 2 walls, got {self.size}, {self.limit} and {self.walls}"
            )

    @property
    def longest(self) -> int:  # type: ignore[override]
        """Half of ``limit``, rounded up."""
        return (self.limit + 1) // 2

    def reset(self, rng: random.Random) -> None:
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        while True:
            chosen = rng.sample(cells, 2 + self.walls)
            self.token, self.goal, self.blocked = chosen[0], chosen[1], set(chosen[2:])
            self.far = self.distances_to_goal()
            if self.far.get(self.token, self.limit + 1) <= self.limit:
                break
        self.taken = 0

    def distances_to_goal(self) -> dict[tuple[int, int], int]:
        """The steps to the goal from each cell (row, column) from which it can be reached."""
        far, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            here = queue.popleft()
            for move in STEPS:
                there = self._to(here, move)
                if there not in far:
                    far[there] = far[here] + 1
                    queue.append(there)
        return far

    def _to(self, cell: tuple[int, int], move: str) -> tuple[int, int]:
        row, column = cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]
        inside = 0 <= row < self.size and 0 <= column < self.size and (row, column) not in self.blocked
        return (row, column) if inside else cell

    def to_move(self) -> tuple[int, ...]:
        return () if self.token == self.goal or self.taken >= self.limit else (self.taken % 2,)

    def observe(self, player: int) -> str:
        marks = {self.goal: "G", self.token: "A", **dict.fromkeys(self.blocked, "#")}
        return "/".join("".join(marks.get((r, c), "_") for c in range(self.size)) for r in range(self.size))

    def moves(self, player: int) -> tuple[str, ...]:
        return tuple(STEPS)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        (move,) = moves.values()
        before = self.far[self.token]
        self.token = self._to(self.token, move)
        self.taken += 1
        paid = self.progress * (before - self.far[self.token]) + float(self.token == self.goal)
        return {0: paid, 1: paid}

    def success(self, player: int) -> bool | None:
        return self.token == self.goal
