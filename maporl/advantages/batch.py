"""TurnBatch: one row per utterance, with the columns by which advantages can be grouped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class TurnBatch:
    """N utterances as columns of N entries. A column that is None was not recorded.

    Args:
        reward: the reward of each utterance.
        value: the critic's value of the state before each utterance.
        prompt: which question the utterance belongs to. In a game, ``game`` and ``seed`` also tell questions apart.
        rollout: which dialogue of the question.
        agent: the agent that spoke.
        role: the role in which it spoke.
        turn: the number of the agent's own turn. ``order`` is the place in the dialogue.
        parent: the row number of the utterance after which this one was branched; None at a root.
        caller: the row number of the utterance that called this one; None if no utterance called it. An utterance
            without a row has a negative number.
        state: a name for the situation in which it was said. Equal names mean equal situations.
        action: a name for the action in that situation. Wordings of one move or of one answer have the same name.
        tokens: the number of the utterance's sampled tokens.
        seconds: how long the calls took that the utterance made.
        task: the task of the question, where tasks are mixed.
        policy: the policy that is trained on it.
        mask: false at padding. Padding counts in no statistic and gets the advantage 0.
        parts: the rewards of which ``reward`` is the weighted sum, each as a column, for ``normalize_then_sum``. None
            is a reward that a row lacks.
        part_weights: the weight of each of the ``parts``, by default 1.
        score: what each utterance earned, where ``reward`` is less than that by the KL. Failures and
            worse groups are found by this, because a KL says nothing about the quality of an answer. By default it is
            ``reward``.

    Raises:
        ValueError: a column has the wrong length, or a reward, value or score is not finite.
    """

    reward: Sequence[float]
    value: Sequence[float] | None = None
    prompt: Sequence[Any] | None = None
    rollout: Sequence[Any] | None = None
    agent: Sequence[Any] | None = None
    role: Sequence[Any] | None = None
    turn: Sequence[int] | None = None
    order: Sequence[int] | None = None
    parent: Sequence[int | None] | None = None
    caller: Sequence[int | None] | None = None
    game: Sequence[Any] | None = None
    seed: Sequence[Any] | None = None
    state: Sequence[Any] | None = None
    action: Sequence[Any] | None = None
    tokens: Sequence[int] | None = None
    mask: Sequence[bool] | None = None
    parts: Mapping[str, Sequence[float | None]] | None = None
    part_weights: Mapping[str, float] | None = None
    seconds: Sequence[float] | None = None
    task: Sequence[Any] | None = None
    policy: Sequence[Any] | None = None
    score: Sequence[float] | None = None

    def __post_init__(self) -> None:
        rows = len(self.reward)
        for name, values in (self.parts or {}).items():
            if len(values) != rows:
                raise ValueError(f"TurnBatch.parts: {name}: expected {rows} entries, one per reward, got {len(values)}")
        for f in fields(self):
            column = getattr(self, f.name)
            if column is None or f.name in ("parts", "part_weights"):
                continue
            if len(column) != rows:
                raise ValueError(f"TurnBatch.{f.name}: expected {rows} entries, one per reward, got {len(column)}")
            setattr(self, f.name, column.tolist() if hasattr(column, "tolist") else list(column))
        for name in ("reward", "value", "score"):
            column = getattr(self, name)
            bad = [i for i in self.rows() if column is not None and not math.isfinite(column[i])]
            if bad:
                raise ValueError(f"TurnBatch.{name}: row {bad[0]} is {column[bad[0]]}; expected a finite one, or mask")

    @property
    def earned(self) -> Sequence[float]:
        """What each utterance earned, without the KL."""
        return self.reward if self.score is None else self.score

    def __len__(self) -> int:
        return len(self.reward)

    def rows(self) -> list[int]:
        """Return the numbers of the rows that are not padding."""
        return [i for i in range(len(self)) if self.mask is None or self.mask[i]]

    def recorded(self) -> list[str]:
        """Return the names of the recorded columns."""
        return [name for name in COLUMNS if getattr(self, name) is not None]

    def column(self, name: str, wanted_by: str) -> list[Any]:
        """Return the column ``name``. ``wanted_by`` says in an error who needs the column.

        Raises:
            ValueError: no column has this name, or it was not recorded.
        """
        if name not in COLUMNS:
            raise ValueError(f"{wanted_by}: unknown column {name!r}; known: {', '.join(COLUMNS)}")
        if (column := getattr(self, name)) is None:
            raise ValueError(f"{wanted_by} needs the column {name!r}, which was not recorded; known: {self.recorded()}")
        return column

    def called(self, row: int) -> bool:
        """Return whether another utterance called this one. Where callers were not recorded, nobody was called."""
        return self.caller is not None and self.caller[row] is not None

    def groups(self, key: Sequence[str], wanted_by: str = "key") -> list[list[int]]:
        """Group the rows that have equal values in the columns of ``key``, in order of first appearance.

        Padding is left out. Each group is a list of row numbers.

        Raises:
            ValueError: a column of the key was not recorded.
        """
        columns = [self.column(name, wanted_by) for name in key]
        keys = list(zip(*columns, strict=True)) if columns else [()] * len(self)
        groups: dict[tuple, list[int]] = {}
        for i in self.rows():
            groups.setdefault(keys[i], []).append(i)
        return list(groups.values())

    def dialogues(self) -> tuple[str, ...]:
        """Return those columns that tell one dialogue from another and were recorded."""
        return tuple(name for name in ("prompt", "rollout", "game", "seed") if getattr(self, name) is not None)

    def trajectories(self, by_agent: bool) -> list[list[int]]:
        """Return the row numbers of each dialogue in speaking order, or of each agent in each dialogue."""
        key = self.dialogues()
        if by_agent and self.agent is not None:
            key = (*key, "agent")
        return [self._spoken(rows) for rows in self.groups(key)]

    def _spoken(self, rows: list[int]) -> list[int]:
        """Sort by place in the dialogue. If ``order`` counts only within a turn, sort by turn first."""
        order, turn = self.order, self.turn
        if order is not None and len({order[i] for i in rows}) == len(rows):
            return sorted(rows, key=lambda i: order[i])
        return sorted(rows, key=lambda i: (turn[i] if turn else 0, order[i] if order else 0))

    def tensor(self, column: Sequence[float]) -> Tensor:
        """Return ``column`` as float64 [N], with 0 at padding."""
        real = set(self.rows())
        return torch.tensor([float(v) if i in real else 0.0 for i, v in enumerate(column)], dtype=torch.float64)


COLUMNS = tuple(
    f.name for f in fields(TurnBatch) if f.name not in ("reward", "value", "mask", "parts", "part_weights", "score")
)
"""The columns by which rows can be grouped."""
