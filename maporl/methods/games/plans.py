"""Puzzles that are solved by whole plans: a tool agent proposes a plan, and a planner decides what is done
(AT-GRPO)."""

import functools
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from maporl.environments.games.base import MARKS, Game, IllegalMove
from maporl.sandbox.sandbox import Limits, Sandbox
from trl_ext.ppo.options import Positive, option

# blank lines belong to the program: two parts of the pattern that take them would try every division between the two
PROGRAM = re.compile(r"```(?:python)?[^\S\n]*\n(.*?)```", re.DOTALL)
LONGEST_PLAN = 256
"""Most symbols of a plan. A short program returns a list of any length, and the planner's prompt has to hold it."""


@dataclass
class Plans(Game):
    """A puzzle for a tool agent, which is player 0, and a planner, which is player 1. A plan is a list of symbols.

    In each of ``rounds`` rounds the tool agent proposes a plan. Then the planner sees this plan and gives its own,
    which is carried out. The game ends when the puzzle is solved. A plan stands after ``####`` or at the end of the
    text. The tool agent may write a Python program instead, between lines of three backquotes, whose function
    ``plan()`` returns the list; it runs in the sandbox.

    A derived class says what a puzzle is: a state that never changes in place, what it shows of the state, what a plan
    makes of it, and how much the state is worth.

    Payments: a plan pays its author what it adds to the worth of the state; the tool agent's plan is tried on a copy.
    What the planner's plan adds is paid to both players once more. A text without a plan pays its author -2 and the
    other nothing; if the game goes on after it, the plan is empty.

    Raises:
        ValueError: ``rounds`` is below 1.
        SandboxError: programs cannot be run safely here.
    """

    interests = "common"
    pays_every_move = True
    illegal = -2.0
    rounds: Positive = option(4, "Number of rounds.")

    def __post_init__(self):
        super().__post_init__()
        _sandbox()  # a run without a sandbox fails here rather than at the first program

    @abstractmethod
    def begin(self, rng: random.Random) -> Any:
        """Draw a new puzzle, and return its first state."""

    @abstractmethod
    def shown(self, state: Any) -> str:
        """The text of a state."""

    @abstractmethod
    def carried_out(self, state: Any, plan: Sequence[str]) -> Any:
        """The state to which ``plan`` leads."""

    @abstractmethod
    def worth(self, state: Any) -> float:
        """What a state is worth. It is highest where the puzzle is solved."""

    @abstractmethod
    def solved(self, state: Any) -> bool:
        """Whether the puzzle is solved."""

    @property
    def longest(self) -> int:  # type: ignore[override]
        """Each player speaks once in each round."""
        return self.rounds

    def reset(self, rng: random.Random) -> None:
        self.state = self.begin(rng)
        self.said = 0
        self.proposed = ""

    def to_move(self) -> tuple[int, ...]:
        return () if self.solved(self.state) or self.said >= 2 * self.rounds else (self.said % 2,)

    def observe(self, player: int) -> str:
        text = self.shown(self.state)
        return text if player == 0 else f"{text}\nProposed plan: {self.proposed or 'none'}"

    def instead(self, player: int, rng: random.Random) -> str:
        """The empty plan."""
        return ""

    def read(self, player: int, text: str) -> str:
        """The plan that ``text`` gives, as symbols with spaces between them.

        Raises:
            IllegalMove: it gives none or too long a one, or its program does not return one.
        """
        symbols = self.moves(player)
        program = PROGRAM.search(text) if player == 0 else None
        plan = _computed(program.group(1)) if program else _stated(text, symbols)
        if not plan or len(plan) > LONGEST_PLAN or not set(plan) <= set(symbols):
            raise IllegalMove(
                f"{text!r:.40} gives no plan; expected a list of {', '.join(symbols)}, at most {LONGEST_PLAN}"
            )
        return " ".join(plan)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        ((player, plan),) = moves.items()
        self.said += 1
        end = self.carried_out(self.state, plan.split())
        added = self.worth(end) - self.worth(self.state)
        if player == 0:
            self.proposed = plan
            return {0: added}
        self.state = end
        return {0: added, 1: 2 * added}

    def success(self, player: int) -> bool | None:
        return self.solved(self.state)


def _stated(text: str, symbols: Sequence[str]) -> Sequence[str]:
    """Return the symbols at the end of ``text``: one in a word, or several in a word as they are written here."""
    words = text.rpartition("####")[2].translate(MARKS).split()
    start = len(words)
    while start and (set(words[start - 1]) <= set(symbols) or words[start - 1].upper() in symbols):
        start -= 1
    return [symbol for word in words[start:] for symbol in word.upper()]


@functools.lru_cache(maxsize=4096)  # a fork plays its game again, and must then read the same plan
def _computed(program: str) -> tuple[str, ...]:
    """Return the list that the program's function ``plan`` returns, with its lists' entries in order; else nothing."""
    value = _sandbox().run(program, "plan").value
    return tuple(_entries(value)) if isinstance(value, list) else ()


def _entries(value: list[Any]) -> Iterator[str]:
    waiting = value[::-1]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, list):
            waiting += reversed(entry)
        else:
            yield str(entry)


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(Limits(cpu_seconds=1), cache=False)  # a batch may hold hundreds of programs that do not end
