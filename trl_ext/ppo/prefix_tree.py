"""Which rows of token ids begin alike, and how a forward pass reads every token of such rows once.

One prompt with its answers, one conversation with its turns and one conversation that forks are trees of tokens: every
row is a path from the root to a leaf. A forward over rows reads a shared prefix once for each row. A forward over a
tree reads it once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

BLOCK = 128
"""About how many queries attend together, if attention goes by blocks."""

WORTHWHILE = 0.75
"""The most tokens of trees, as a share of those of the rows, for which trees are read.

Planning trees and attending over their mask take time too. Where there is less to save, rows are as fast.
"""


@dataclass(frozen=True)
class TreeLimits:
    """How far a model can read trees.

    ``longest`` is the longest row that it reads rightly as part of a tree. ``free`` is the number of keys that a token
    can attend to in the time of its linear layers. ``blocks`` says whether attention goes by blocks of queries, each of
    which attends to little more than one row. Otherwise every query attends to the whole line.
    """

    longest: float
    free: float
    blocks: bool = False

    def cost(self, tokens: int, row: int) -> float:
        """Return how long a line of ``tokens`` takes, in the time that a token takes to attend to a key.

        ``row`` is the length of its rows.
        """
        return tokens * (self.free + (min(tokens, row + BLOCK) if self.blocks else tokens))


@dataclass(frozen=True)
class Layout:
    """Where a forward reads the tokens of N rows, of which the longest has T: in P lines of L tokens.

    The tokens of a line stand in the order in which a walk through its trees first meets them. The tokens that follow a
    token in some row are then right behind it.
    """

    row: np.ndarray  # [P, L] a row that holds the token; 0 at padding
    column: np.ndarray  # [P, L] the token's column there, which is its position; 0 at padding
    end: np.ndarray  # [P, L] the first place behind the token and all that follow it in some row
    place: np.ndarray  # [N, T-1] the flattened place of every token of the rows but their last

    def seen(self, device: torch.device) -> Tensor:
        """Return which keys each query attends to, [P, 1, L, L]: itself and the tokens before it in its rows."""
        end = torch.from_numpy(self.end).to(device).unsqueeze(1)
        place = torch.arange(end.shape[2], device=device)
        query = place.unsqueeze(1)
        return ((place <= query) & (query < end)).unsqueeze(1)


@dataclass(frozen=True)
class PrefixTree:
    """The prefixes that N rows of token ids share, kept on the host.

    In sorted order, a row shares with any earlier row at most what it shares with the row right before it. Two numbers
    for each row therefore describe the whole tree.
    """

    rank: list[int]  # the row's place in sorted order
    shared: list[int]  # how many first tokens the row shares with the row before it in that order
    lengths: list[int]
    part: list[int]  # rows of different parts share nothing, and are on different lines

    @classmethod
    def of(cls, sequences: Sequence[list[int]]) -> "PrefixTree":
        """Return what ``sequences`` share."""
        order = sorted(range(len(sequences)), key=sequences.__getitem__)
        lengths = [len(sequence) for sequence in sequences]
        ids = np.full((len(order), max(lengths, default=0) + 1), -1, dtype=np.int64)
        for number, row in enumerate(order):
            ids[number, : lengths[row]] = sequences[row]
        differ = ids[1:] != ids[:-1]
        first = np.where(differ.any(1), differ.argmax(1), [lengths[row] for row in order[1:]]).tolist()
        rank, shared = [0] * len(order), [0] * len(order)
        for number, row in enumerate(order):
            rank[row], shared[row] = number, first[number - 1] if number else 0
        return cls(rank, shared, lengths, [0] * len(order))

    @classmethod
    def joined(cls, parts: "Sequence[PrefixTree]") -> "PrefixTree":
        """Return the rows of all ``parts``. Each has rows that share nothing and no line with those of another."""
        starts = np.cumsum([0, *(max(part.rank, default=-1) + 1 for part in parts)]).tolist()
        return cls(
            [start + rank for part, start in zip(parts, starts, strict=False) for rank in part.rank],
            [shared for part in parts for shared in part.shared],
            [length for part in parts for length in part.lengths],
            [number for number, part in enumerate(parts) for _ in part.part],
        )

    def take(self, index: Sequence[int]) -> "PrefixTree":
        """Return what the rows at ``index`` share, of which none may stand there twice."""
        if not len(index):
            return PrefixTree([], [], [], [])
        rank = np.array(self.rank)[index]
        order = rank.argsort()
        ordered = rank[order]
        shared = np.zeros(len(index), dtype=np.int64)
        if len(index) > 1:  # two rows share what all pairs of neighbours between them do
            shared[order[1:]] = np.minimum.reduceat(self._shared_in_order[: ordered[-1] + 1], ordered[:-1] + 1)
        return PrefixTree(
            rank.tolist(),
            shared.tolist(),
            [self.lengths[row] for row in index],
            [self.part[row] for row in index],
        )

    @cached_property
    def _order(self) -> list[int]:
        """The rows in sorted order."""
        return sorted(range(len(self.rank)), key=self.rank.__getitem__)

    @cached_property
    def _shared_in_order(self) -> np.ndarray:
        """What the row of each rank shares with the one before it. A rank that no row has shares everything."""
        shared = np.full(max(self.rank) + 1, np.iinfo(np.int64).max)
        shared[self.rank] = self.shared
        return shared

    @cached_property
    def chains(self) -> list[int]:
        """The shared-prefix group of each row, which is the index of the group's longest row.

        A row that begins another one joins that one's group.
        """
        chain = list(range(len(self.rank)))
        for row, after in reversed(list(pairwise(self._order))):
            if self.shared[after] == self.lengths[row]:
                chain[row] = chain[after]
        return chain

    def worthwhile(self, limits: TreeLimits | None) -> bool:
        """Return whether the rows share so much that reading them as trees may be faster."""
        if limits is None or not self.rank or max(self.lengths) > limits.longest:
            return False
        tokens = sum(self.lengths) - len(self.lengths) - sum(self._held(self._order))
        return tokens <= WORTHWHILE * len(set(self.chains)) * (max(self.lengths) - 1)

    def trees(self, limits: TreeLimits) -> list[list[int]]:
        """Return the rows in groups of which each is best read as one tree, every group in sorted order.

        A row joins the tree of the row before it unless attention over the larger tree takes longer than reading the
        row alone.
        """
        groups: list[list[int]] = []
        size = 0
        for row in self._order:
            length = self.lengths[row] - 1
            added = length - min(self.shared[row], length)
            if (
                self.shared[row] > 0
                and groups
                and limits.cost(size + added, length) - limits.cost(size, length) <= limits.cost(length, length)
            ):
                groups[-1].append(row)
                size += added
            else:
                groups.append([row])
                size = length
        return groups

    def reads(self, limits: TreeLimits | None) -> int:
        """Return how many tokens a forward over the rows reads, padding included."""
        packed = self._packed(limits)
        return len(set(self.chains)) * max(self.lengths, default=0) if packed is None else len(packed[0]) * packed[1]

    def layout(self, limits: TreeLimits | None) -> Layout | None:
        """Return where each token is read once, or None if the model must read rows, or reads them no slower."""
        packed = self._packed(limits)
        return None if packed is None else self._filled(*packed)

    def _packed(self, limits: TreeLimits | None) -> tuple[list[list[list[int]]], int] | None:
        """Return the rows of the trees in each line and the length of the lines, or None if rows are to be read."""
        if limits is None or not self.worthwhile(limits):
            return None
        trees = self.trees(limits)
        sizes = [sum([self.lengths[row] - 1 for row in tree]) - sum(self._held(tree)) for tree in trees]
        width, rows, columns = max(sizes), len(set(self.chains)), max(self.lengths) - 1
        lines: list[list[list[int]]] = []
        room: list[tuple[int, int]] = []  # in each line: how many tokens, and of which part
        for number in sorted(range(len(trees)), key=lambda number: -sizes[number]):
            size, part = sizes[number], self.part[trees[number][0]]
            line = next((n for n, (free, other) in enumerate(room) if free >= size and other == part), len(lines))
            if line == len(lines):
                lines.append([])
                room.append((width, part))
            lines[line].append(trees[number])
            room[line] = (room[line][0] - size, part)
        if len(lines) * limits.cost(width, columns) >= rows * limits.cost(columns, columns):
            return None
        return lines, width + (-width % max(1, round(width / BLOCK)) if limits.blocks else 0)

    def _held(self, rows: list[int]) -> list[int]:
        """Return how many tokens of each of ``rows``, in sorted order, but its last the one before it holds."""
        lengths = [self.lengths[row] - 1 for row in rows]
        return [min(self.shared[row], *pair) for row, pair in zip(rows, pairwise([0, *lengths]), strict=True)]

    def _filled(self, lines: list[list[list[int]]], width: int) -> Layout:
        shape = (len(lines), width)
        row, column = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        end = np.tile(np.arange(1, width + 1), (len(lines), 1))  # padding is seen by itself alone
        place = np.zeros((len(self.rank), max(self.lengths) - 1), dtype=np.int64)
        for number, line in enumerate(lines):
            stop = 0
            for tree in line:
                before = np.zeros(0, dtype=np.int64)  # the places in the line of the tokens of the row before
                for index, held in zip(tree, self._held(tree), strict=True):
                    length = self.lengths[index] - 1
                    end[number, before[held:]] = stop
                    start, stop = stop, stop + length - held
                    row[number, start:stop] = index
                    column[number, start:stop] = np.arange(held, length)
                    before = np.concatenate([before[:held], np.arange(start, stop)])
                    place[index, :length] = number * width + before
                end[number, before] = stop
        return Layout(row, column, end, place)
