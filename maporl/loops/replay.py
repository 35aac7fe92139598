"""Which earlier rounds a stage trains on beside the present one, and how much of each. No torch."""

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from maporl.loops.rows import AnyRow, Pair, TrajectoryPair


def shares(replay: str | Mapping[Literal["nearest", "decay"], float], rounds: int) -> list[float]:
    """Return the share of its rows that each of ``rounds`` rounds gives, the present one first.

    >>> shares("current", 3), shares("all", 3), shares({"nearest": 2}, 3), shares({"decay": 0.5}, 3)
    ([1.0], [1.0, 1.0, 1.0], [1.0, 1.0], [1.0, 0.5, 0.25])
    """
    if isinstance(replay, Mapping):
        ((name, number),) = replay.items()
        if name == "nearest":
            return [1.0] * min(int(number), rounds)
        return [float(number) ** age for age in range(rounds)]
    return [1.0] * (rounds if replay == "all" else 1)


def drawn(rows: Sequence[AnyRow], share: float, name: str) -> list[AnyRow]:
    """Return a random share of the rows, in their order. ``name`` decides chance. Pairs of the same dialogues stay together."""
    keys = list(dict.fromkeys(_key(row) for row in rows))
    kept = set(random.Random(name).sample(keys, round(share * len(keys))))
    return [row for row in rows if _key(row) in kept]


def _key(row: AnyRow) -> tuple:
    return row.together if isinstance(row, Pair | TrajectoryPair) else row.place
