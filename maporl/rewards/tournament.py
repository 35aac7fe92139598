"""Seeded single elimination, by which ArenaRL ranks answers (arXiv 2601.06487). Pure Python, no torch."""

from collections.abc import Callable, Generator

from maporl.rounding import exceeds, mean_rank


def eliminate(players: int, compare: Callable[[int, int], tuple[float, float]]) -> list[int]:
    """Rank players by seeded single elimination; rank 0 is the best.

    ``compare(a, b)`` returns the points of a and of b in a match against each other.

    >>> qualities = (5, 8, 6, 3)
    >>> eliminate(4, lambda a, b: (qualities[a], qualities[b]))
    [2, 0, 1, 3]
    """
    tournament = bouts(players)
    try:
        pairs = next(tournament)
        while True:
            pairs = tournament.send([compare(a, b) for a, b in pairs])
    except StopIteration as end:
        return end.value


def bouts(players: int) -> Generator[list[tuple[int, int]], list[tuple[float, float]], list[int]]:
    """Play a tournament as a generator, so that a caller can judge all pairs of a round in one batch.

    The generator yields the pairs of each round and receives the points of both players of each pair. It returns the
    ranks; rank 0 is the best.
    """
    if players < 2:
        return [0] * players
    points: list[list[float]] = [[] for _ in range(players)]

    def record(pairs: list[tuple[int, int]], scores: list[tuple[float, float]]) -> None:
        for pair, both in zip(pairs, scores, strict=True):
            for player, score in zip(pair, both, strict=True):
                points[player].append(score)

    pairs = [(0, other) for other in range(1, players)]
    record(pairs, (yield pairs))
    seeds = sorted(range(players), key=lambda i: -mean_rank(points[i]))
    size = 1 << (players - 1).bit_length()
    bracket: list[int | None] = [seeds[s] if s < players else None for s in _bracket(size)]
    out: list[list[int]] = []
    while len(bracket) > 1:
        met = list(zip(bracket[::2], bracket[1::2], strict=True))
        pairs = [(a, b) for a, b in met if a is not None and b is not None]
        scores = yield pairs
        record(pairs, scores)
        won = {pair: pair[1] if exceeds(y, x) else pair[0] for pair, (x, y) in zip(pairs, scores, strict=True)}
        out.append([a if won[a, b] == b else b for a, b in pairs])
        bracket = [won[a, b] if a is not None and b is not None else (b if a is None else a) for a, b in met]
    champion = bracket[0]
    assert champion is not None
    order = [champion, *(i for lost in reversed(out) for i in sorted(lost, key=lambda i: -mean_rank(points[i])))]
    return [order.index(i) for i in range(players)]


def _bracket(size: int) -> list[int]:
    """Return the seeds in bracket order: the best meets the worst, and the two best can meet only in the final."""
    order = [0]
    while len(order) < size:
        order = [seed for best in order for seed in (best, 2 * len(order) - 1 - best)]
    return order
