"""Sokoban with whole plans: push all boxes onto goals (after AT-GRPO's games)."""

import functools
import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from maporl.methods.games.plan_path import STEPS, Cell, drawn
from maporl.methods.games.plans import Plans
from trl_ext.ppo.options import option

State = tuple[Cell, frozenset[Cell]]
"""The cell of the player, and the cells of the boxes."""


def moved(state: State, move: str, free: Collection[Cell]) -> State:
    """Return the state after ``move``, which pushes a box if one is in the way and the cell behind it is free.

    Without a free cell nothing moves.
    """
    (row, column), boxes = state
    down, right = STEPS[move]
    there, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if there not in free:
        return state
    if there not in boxes:
        return there, boxes
    return state if behind in boxes or behind not in free else (there, boxes - {there} | {behind})


def solvable(free: Collection[Cell], goals: frozenset[Cell]) -> dict[State, int]:
    """Return every state from which the boxes can be pushed onto ``goals``, with the smallest number of moves to it.

    It walks back from the solved states: the player steps back, and may pull along the box that it has pushed.
    """
    far: dict[State, int] = {(cell, goals): 0 for cell in free if cell not in goals}
    queue = deque(far)
    while queue:
        state = queue.popleft()
        for earlier in _before(state, free):
            if earlier not in far:
                far[earlier] = far[state] + 1
                queue.append(earlier)
    return far


def _before(state: State, free: Collection[Cell]) -> Iterator[State]:
    """Yield the states from which one move leads to ``state``."""
    (row, column), boxes = state
    for down, right in STEPS.values():
        here, pushed = (row - down, column - right), (row + down, column + right)
        if here not in free or here in boxes:
            continue
        yield here, boxes
        if pushed in boxes:
            yield here, boxes - {pushed} | {(row, column)}


@functools.lru_cache(maxsize=4096)  # a fork plays its game again
def level(size: int, boxes: int, walls: float, seed: int) -> tuple[frozenset[Cell], frozenset[Cell], State]:
    """Return the free cells, the goals and the first state of a level that ``seed`` draws.

    The first state is one of those that can be solved and have no box on a goal, all equally likely.
    """
    rng = random.Random(seed)
    inner: list[Cell] = [(r, c) for r in range(1, size - 1) for c in range(1, size - 1)]
    while True:
        free = frozenset(cell for cell in inner if rng.random() >= walls)
        if len(free) <= 2 * boxes:
            continue
        goals = frozenset(rng.sample(sorted(free), boxes))
        starts = sorted((player, sorted(on)) for player, on in solvable(free, goals) if not on & goals)
        if starts:
            player, on = rng.choice(starts)
            return free, goals, (player, frozenset(on))


@dataclass
class Sokoban(Plans):
    """A ``size`` x ``size`` room with ``boxes`` boxes and as many goals. The level can be solved.

    The outer cells are walls, and each inner cell is one with probability ``walls``. At first no box is on a goal. A
    plan is a list of the moves U, D, L and R, and there are ``rounds`` rounds
    (:class:`~maporl.methods.games.plans.Plans`). A move that is not possible changes nothing, and the plan goes
    on.

    Players see the rows of the room in the usual signs: ``#`` wall, ``@`` player, ``$`` box, ``.`` goal, ``*`` box on a
    goal, ``+`` player on a goal, and a space for free floor.

    Payments: a plan pays its author ``progress`` for each cell by which boxes came nearer to their nearest goals, minus
    ``progress`` for each by which they went farther, and 1 if it solves the level; the tool agent's plan is tried on a
    copy. What the planner's plan earns is paid to both players once more. A text without a plan pays its author -2 and
    the other nothing; if the game goes on after it, the plan is empty.

    Raises:
        ValueError: an option is outside its range.
    """

    size: Annotated[int, Ge(5), Le(8)] = option(6, "Rows and columns of the room.")
    boxes: Literal[1, 2] = option(1, "Number of boxes.")
    walls: Annotated[float, Ge(0), Le(0.3)] = option(0.15, "The probability that an inner cell is a wall.")
    progress: float = option(0.1, "What a cell pays by which boxes came nearer to their goals.")

    def begin(self, rng: random.Random) -> State:
        """Draw a level, and return its first state."""
        self.free, self.goals, state = level(self.size, self.boxes, self.walls, rng.getrandbits(64))
        return state

    def shown(self, state: State) -> str:
        """The rows of the room."""
        player, boxes = state
        marks = dict.fromkeys(self.free, " ") | dict.fromkeys(self.goals, ".")
        marks |= {box: "*" if box in self.goals else "$" for box in boxes}
        marks[player] = "+" if player in self.goals else "@"
        return drawn(marks, self.size)

    def moves(self, player: int) -> tuple[str, ...]:
        """The moves of which a plan consists."""
        return tuple(STEPS)

    def carried_out(self, state: State, plan: Sequence[str]) -> State:
        """The state after ``plan``, which ends where the level is solved."""
        for move in plan:
            if self.solved(state):
                break
            state = moved(state, move, self.free)
        return state

    def worth(self, state: State) -> float:
        """1 if the level is solved, minus ``progress`` times the distances of all boxes to their nearest goals."""
        distance = sum(min(abs(r - row) + abs(c - column) for r, c in self.goals) for row, column in state[1])
        return float(self.solved(state)) - self.progress * distance

    def solved(self, state: State) -> bool:
        """Whether every box is on a goal."""
        return state[1] == self.goals
