"""Which earlier rounds a stage trains on beside the present one, and how much of each. No torch."""

import random
from collections import Counter
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
    """Return a random share of the rows, in their order.

    ``name`` decides chance. Pairs of the same dialogues stay together.
    """
    keys = list(dict.fromkeys(_key(row) for row in rows))
    chosen = set(random.Random(name).sample(keys, round(share * len(keys))))
    return [row for row in rows if _key(row) in chosen]


def redrawn(rounds: Sequence[Sequence[AnyRow]], shares: Sequence[float], name: str) -> list[AnyRow]:
    """Return as many rows as the newest round has, drawn from all ``rounds``, the newest first (CoMLRL's replay of
    preferences).

    A row comes from a round with a chance in proportion to the round's share, whatever its number of rows. A round
    gives no row twice until it has given all of them. ``name`` decides chance. Pairs of the same dialogues stay
    together. A round without rows counts as none.
    """
    shards = [(by_key, share) for rows, share in zip(rounds, shares, strict=True) if (by_key := _by_key(rows))]
    if not shards:
        return []
    chance = random.Random(name)
    taken = Counter(chance.choices(range(len(shards)), [share for _, share in shards], k=len(shards[0][0])))
    picked: list[AnyRow] = []
    for number, (by_key, _) in enumerate(shards):
        whole, rest = divmod(taken[number], len(by_key))
        picked += [row for key in [*list(by_key) * whole, *chance.sample(list(by_key), rest)] for row in by_key[key]]
    return picked


def _by_key(rows: Sequence[AnyRow]) -> dict[tuple, list[AnyRow]]:
    groups: dict[tuple, list[AnyRow]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return groups


def _key(row: AnyRow) -> tuple:
    return row.together if isinstance(row, Pair | TrajectoryPair) else row.place
