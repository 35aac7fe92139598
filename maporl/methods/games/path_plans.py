"""Plan-path with whole plans: a tool agent proposes a plan, and a planner decides which plan is walked (AT-GRPO)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from maporl.methods.games.plan_path import STEPS, Cell, distances, drawn, step_to
from maporl.methods.games.plans import Plans
from trl_ext.ppo.options import option


@dataclass
class PathPlans(Plans):
    """A ``size`` x ``size`` grid, in which each cell is blocked with probability ``blocked``. The goal can be reached.

    A plan is a list of the moves U, D, L and R, for example ``#### ["R", "R", "D"]``, and the planner's is walked.
    There are ``rounds`` rounds (:class:`~maporl.methods.games.plans.Plans`). A move into a wall or off the grid
    leaves the token in its place, and the plan goes on.

    Players see the rows of the grid: ``S`` is the token, ``G`` the goal, ``#`` blocked and ``.`` free.

    Payments: a plan pays its author 1 if it reaches the goal; the tool agent's plan is tried on a copy of the grid.
    When the planner's plan reaches the goal, both players get 1 more. A text without a plan pays its author -2 and the
    other nothing; if the game goes on after it, the plan is empty.

    Raises:
        ValueError: an option is outside its range.
    """

    size: Annotated[int, Ge(2)] = option(10, "Rows and columns of the grid.")
    blocked: Annotated[float, Ge(0), Le(0.5)] = option(0.22, "The probability that a cell is blocked.")

    def begin(self, rng: random.Random) -> Cell:
        """Draw a grid, and return the token's cell, which is the state."""
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        while True:
            self.free = {cell for cell in cells if rng.random() >= self.blocked}
            if len(self.free) < 2:
                continue
            token, self.goal = rng.sample(sorted(self.free), 2)
            if token in distances(self.goal, self.free):
                return token

    def shown(self, state: Cell) -> str:
        """The rows of the grid."""
        marks = dict.fromkeys(self.free, ".") | {self.goal: "G", state: "S"}
        return drawn(marks, self.size)

    def moves(self, player: int) -> tuple[str, ...]:
        """The moves of which a plan consists."""
        return tuple(STEPS)

    def carried_out(self, state: Cell, plan: Sequence[str]) -> Cell:
        """The cell where the token ends by walking ``plan``, which ends at the goal."""
        for move in plan:
            if state == self.goal:
                break
            state = step_to(state, move, self.free)
        return state

    def worth(self, state: Cell) -> float:
        """1 at the goal, and 0 elsewhere."""
        return float(self.solved(state))

    def solved(self, state: Cell) -> bool:
        """Whether the token is at the goal."""
        return state == self.goal
