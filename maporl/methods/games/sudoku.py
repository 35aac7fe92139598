"""Sudoku with whole plans: fill in a grid (after AT-GRPO's games)."""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from maporl.methods.games.plans import Plans
from trl_ext.ppo.options import option

Numbers = tuple[int, ...]
"""The numbers of the 16 cells, row by row; 0 where a cell is empty."""
SIZE, BLOCK = 4, 2


@functools.cache
def peers(cell: int) -> frozenset[int]:
    """Return the other cells of the row, the column and the block of ``cell``."""
    row, column = divmod(cell, SIZE)
    return frozenset(
        other
        for other in range(SIZE**2)
        if other != cell
        and (
            other // SIZE == row
            or other % SIZE == column
            or (other // SIZE // BLOCK, other % SIZE // BLOCK) == (row // BLOCK, column // BLOCK)
        )
    )


def solutions(numbers: Numbers, rng: random.Random | None = None) -> Iterator[Numbers]:
    """Yield every way to fill in the empty cells. ``rng`` shuffles the order in which numbers are tried."""
    fits = {
        cell: sorted(set(range(1, SIZE + 1)) - {numbers[peer] for peer in peers(cell)})
        for cell, number in enumerate(numbers)
        if not number
    }
    if not fits:
        yield numbers
        return
    cell = min(fits, key=lambda cell: len(fits[cell]))
    if rng is not None:
        rng.shuffle(fits[cell])
    for number in fits[cell]:
        yield from solutions((*numbers[:cell], number, *numbers[cell + 1 :]), rng)


def unique(numbers: Numbers) -> bool:
    """Return whether there is exactly one way to fill in the empty cells."""
    fillings = solutions(numbers)
    return next(fillings, None) is not None and next(fillings, None) is None


@functools.lru_cache(maxsize=4096)  # a fork plays its game again
def puzzle(empty: int, seed: int) -> Numbers:
    """Return the puzzle that ``seed`` draws.

    It is a random full grid from which numbers are taken in random order, as long as one solution is left.
    """
    rng = random.Random(seed)
    while True:
        numbers = next(solutions((0,) * SIZE**2, rng))
        for cell in rng.sample(range(SIZE**2), SIZE**2):
            fewer = (*numbers[:cell], 0, *numbers[cell + 1 :])
            if numbers.count(0) < empty and unique(fewer):
                numbers = fewer
        if numbers.count(0) == empty:
            return numbers


@dataclass
class Sudoku(Plans):
    """A 4 x 4 grid with ``empty`` empty cells, which can be filled in in exactly one way.

    Every row, column and block holds the numbers 1 to 4. A plan is a list of numbers: of all cells row by row, for
    example ``#### [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]``, or of the empty cells in this order.
    There are ``rounds`` rounds (:class:`~maporl.methods.games.plans.Plans`). Given numbers stay. All others that
    stand twice in a row, column or block are taken out again. A list of all cells may change what an earlier one wrote.

    Players see the rows of the grid, with a dot for an empty cell.

    Payments: a plan pays its author 1 if it solves the puzzle; the tool agent's plan is tried on a copy. When the
    planner's plan solves it, both players get 1 more. A text without a plan pays its author -2 and the other nothing;
    if the game goes on after it, the plan is empty.

    Raises:
        ValueError: an option is outside its range.
    """

    empty: Annotated[int, Ge(1), Le(11)] = option(10, "Number of empty cells.")

    def begin(self, rng: random.Random) -> Numbers:
        """Draw a puzzle, which is the first state."""
        self.given = puzzle(self.empty, rng.getrandbits(64))
        return self.given

    def shown(self, state: Numbers) -> str:
        """The rows of the grid."""
        signs = [str(number) if number else "." for number in state]
        return "\n".join(" ".join(signs[i : i + SIZE]) for i in range(0, len(signs), SIZE))

    def moves(self, player: int) -> tuple[str, ...]:
        """The numbers of which a plan consists."""
        return tuple(str(number) for number in range(1, SIZE + 1))

    def carried_out(self, state: Numbers, plan: Sequence[str]) -> Numbers:
        """The grid with the plan's numbers, without those that stand twice."""
        whole = len(plan) >= len(state)
        cells = [cell for cell, number in enumerate(state) if whole or not number]
        written = list(state)
        for cell, number in zip(cells, plan, strict=False):
            written[cell] = self.given[cell] or int(number)
        clash = {c for c in range(len(state)) if written[c] in {written[peer] for peer in peers(c)}}
        return tuple(0 if c in clash and not self.given[c] else number for c, number in enumerate(written))

    def worth(self, state: Numbers) -> float:
        """1 if the puzzle is solved, else 0."""
        return float(self.solved(state))

    def solved(self, state: Numbers) -> bool:
        """Whether every cell has a number; numbers that clash are never kept."""
        return 0 not in state
