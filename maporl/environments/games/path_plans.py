"""Plan-path with whole plans: a tool agent proposes a plan, and a planner decides which plan is walked (AT-GRPO)."""

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maporl.environments.games.base import MARKS, Game, IllegalMove
from maporl.environments.games.plan_path import STEPS, Cell, distances, step_to
from maporl.sandbox.sandbox import Sandbox

PROGRAM = re.compile(r"```(?:python)?\s*\n(.*?)```", re.DOTALL)


@dataclass
class PathPlans(Game):
    """A ``size`` x ``size`` grid, in which each cell is blocked with probability ``blocked``. The goal can be reached.

    In each of ``rounds`` rounds, player 0, the tool agent, proposes a plan. Then player 1, the planner, sees this plan
    and gives its own, which is walked. The game ends when the goal is reached. A plan is a list of the moves U, D, L
    and R. It stands after ``####`` or at the end of the text, for example ``#### ["R", "R", "D"]``. The tool agent may
    write a Python program instead, between lines of three backquotes, whose function ``plan()`` returns the list; it
    runs in the sandbox. A move into a wall or off the grid leaves the token in its place, and the plan goes on.

    Players see the rows of the grid: ``S`` is the token, ``G`` the goal, ``#`` blocked and ``.`` free.

    Payments: a plan pays its author 1 if it reaches the goal; the tool agent's plan is tried on a copy of the grid.
    When the planner's plan reaches the goal, both players get 1 more. A text without a plan pays its author -2 and the
    other nothing; if the game goes on after it, the plan is empty.

    Raises:
        ValueError: an option is outside its range.
    """

    interests = "common"
    pays_every_move = True
    illegal = -2.0
    size: int = 10
    blocked: float = 0.22
    rounds: int = 4

    def __post_init__(self):
        if self.size < 2 or not 0 <= self.blocked <= 0.5 or self.rounds < 1:
            raise ValueError(
                "expected size >= 2, blocked from 0 to 0.5 and rounds >= 1, got "
                f"{self.size}, {self.blocked} and {self.rounds}"
            )

    @property
    def longest(self) -> int:  # type: ignore[override]
        """Each player speaks once in each round."""
        return self.rounds

    def reset(self, rng: random.Random) -> None:
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        while True:
            self.free = {cell for cell in cells if rng.random() >= self.blocked}
            if len(self.free) < 2:
                continue
            self.token, self.goal = rng.sample(sorted(self.free), 2)
            if self.token in distances(self.goal, self.free):
                break
        self.said = 0
        self.proposed = ""

    def to_move(self) -> tuple[int, ...]:
        return () if self.token == self.goal or self.said >= 2 * self.rounds else (self.said % 2,)

    def observe(self, player: int) -> str:
        marks = dict.fromkeys(self.free, ".") | {self.goal: "G", self.token: "S"}
        grid = "\n".join("".join(marks.get((r, c), "#") for c in range(self.size)) for r in range(self.size))
        return grid if player == 0 else f"{grid}\nProposed plan: {self.proposed or 'none'}"

    def moves(self, player: int) -> tuple[str, ...]:
        """The moves of which a plan consists."""
        return tuple(STEPS)

    def instead(self, player: int, rng: random.Random) -> str:
        """The empty plan."""
        return ""

    def read(self, player: int, text: str) -> str:
        """The plan that ``text`` gives, as moves with spaces between them.

        Raises:
            IllegalMove: it gives none, or its program does not return one.
        """
        program = PROGRAM.search(text) if player == 0 else None
        plan: Sequence[str] = _computed(program.group(1)) if program else _stated(text)
        if not plan:
            raise IllegalMove(f"{text!r:.40} gives no plan; expected a list of the moves {', '.join(STEPS)}")
        return " ".join(plan)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        ((player, plan),) = moves.items()
        self.said += 1
        end = self._walked(plan.split())
        reached = end == self.goal
        if player == 0:
            self.proposed = plan
            return {0: float(reached)}
        self.token = end
        return {0: float(reached), 1: 2.0 * reached}

    def _walked(self, plan: list[str]) -> Cell:
        """Return where the token ends by walking ``plan``, which ends at the goal."""
        cell = self.token
        for move in plan:
            cell = step_to(cell, move, self.free)
            if cell == self.goal:
                break
        return cell

    def success(self, player: int) -> bool | None:
        return self.token == self.goal


def _stated(text: str) -> list[str]:
    """Return the moves at the end of ``text``: one letter each, or several letters in capitals without spaces."""
    words = text.rpartition("####")[2].translate(MARKS).split()
    plan: list[str] = []
    while words and (set(words[-1]) <= set(STEPS) or words[-1].upper() in STEPS):
        plan = [*words.pop().upper(), *plan]
    return plan


@functools.lru_cache(maxsize=4096)  # a fork plays its game again, and must then read the same plan
def _computed(program: str) -> tuple[str, ...]:
    """Return the list that the program's function ``plan`` returns; empty if it returns something else."""
    value: Any = _sandbox().run(program, "plan").value
    return tuple(value) if isinstance(value, list) and set(map(str, value)) <= set(STEPS) else ()


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(cache=False)
