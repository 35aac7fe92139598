"""Plan-path: two players walk one token through a grid to its goal, taking turns (after AT-GRPO's planning tasks)."""

import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from maporl.environments.games.base import Game
from trl_ext.ppo.options import Natural, Positive, option

Cell = tuple[int, int]
"""The row and the column of a cell, from 0."""
STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def drawn(marks: Mapping[Cell, str], size: int) -> str:
    """Return the rows of a ``size`` x ``size`` grid as lines. A cell without a mark is a wall, ``#``."""
    return "\n".join("".join(marks.get((row, column), "#") for column in range(size)) for row in range(size))


def step_to(cell: Cell, move: str, free: Collection[Cell]) -> Cell:
    """Return the cell to which ``move`` leads, or ``cell`` itself if that one is not ``free``."""
    there = (cell[0] + STEPS[move][0], cell[1] + STEPS[move][1])
    return there if there in free else cell


def distances(goal: Cell, free: Collection[Cell]) -> dict[Cell, int]:
    """Return the number of moves to ``goal`` from each ``free`` cell from which it can be reached."""
    far, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for move in STEPS:
            there = step_to(here, move, free)
            if there not in far:
                far[there] = far[here] + 1
                queue.append(there)
    return far


@dataclass
class PlanPath(Game):
    """A ``size`` x ``size`` grid with ``walls`` walls; the goal can be reached in ``limit`` moves.

    A player sees the rows of the grid: ``A`` is the token, ``G`` the goal, ``#`` a wall and ``_`` free. A move into a
    wall or off the grid leaves the token in its place.

    Payments: every move pays both players the same. They get ``progress`` if it brought the token a step nearer to the
    goal, minus ``progress`` if a step farther, and 1 more if the token arrived. An illegal move pays its author -1.5
    and the other nothing.

    Raises:
        ValueError: an option is outside its range.
    """

    interests = "common"
    pays_every_move = True
    skips = True
    size: Annotated[int, Ge(2)] = option(4, "Rows and columns of the grid.")
    walls: Natural = option(2, "Number of walls.")
    limit: Positive = option(6, "Most moves to the goal.")
    progress: float = option(0.1, "What a step nearer to the goal pays.")

    def __post_init__(self):
        super().__post_init__()
        if self.walls > self.size**2 - 2:
            raise ValueError(f"walls: expected at most {self.size**2 - 2}, beside start and goal, got {self.walls}")

    @property
    def longest(self) -> int:  # type: ignore[override]
        """Half of ``limit``, rounded up."""
        return (self.limit + 1) // 2

    def reset(self, rng: random.Random) -> None:
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        while True:
            chosen = rng.sample(cells, 2 + self.walls)
            self.token, self.goal, self.free = chosen[0], chosen[1], set(cells) - set(chosen[2:])
            self.far = distances(self.goal, self.free)
            if self.far.get(self.token, self.limit + 1) <= self.limit:
                break
        self.taken = 0

    def to_move(self) -> tuple[int, ...]:
        return () if self.token == self.goal or self.taken >= self.limit else (self.taken % 2,)

    def observe(self, player: int) -> str:
        marks = dict.fromkeys(self.free, "_") | {self.goal: "G", self.token: "A"}
        return "/".join("".join(marks.get((r, c), "#") for c in range(self.size)) for r in range(self.size))

    def moves(self, player: int) -> tuple[str, ...]:
        return tuple(STEPS)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        if not moves:  # the player passes
            self.taken += 1
            return {}
        (move,) = moves.values()
        before = self.far[self.token]
        self.token = step_to(self.token, move, self.free)
        self.taken += 1
        paid = self.progress * (before - self.far[self.token]) + float(self.token == self.goal)
        return {0: paid, 1: paid}

    def success(self, player: int) -> bool | None:
        return self.token == self.goal
