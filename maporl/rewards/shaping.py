"""Rules that turn scores into credit: pure numpy on arrays ``[turn, agent, question]``, NaN where not played."""

import numpy as np

HORIZONS = ("current", "last", "discounted_sum")
SHARES = ("individual", "all")


def share_scores(
    scores: np.ndarray, horizon: str = "discounted_sum", share: str = "all", discount: float = 0.3
) -> np.ndarray:
    """The credit of each utterance from its own and later scores: six rules (MAPoRL, arXiv 2502.18439, sec. 3).

    Let V be ``scores`` [turn, agent, question], x(q) the last turn that question q was played, W[k] = V of the same
    agent (``individual``) or the mean over agents (``all``) at turn k, and g = ``discount``.

    - ``current``: W[t]
    - ``last``: W[x]
    - ``discounted_sum``: (V[t] + sum_{k=t+1..x} g^(k-t) W[k]) / sum_{k=t..x} g^(k-t)

    ``discounted_sum`` with ``all`` is the paper's influence-aware reward; the division keeps it in the range of the
    scores. NaN where not played, in and out.
    """
    if horizon not in HORIZONS or share not in SHARES:
        raise ValueError(
            f"share_scores: horizon must be one of {HORIZONS} and share one of {SHARES}, got {horizon!r}, {share!r}"
        )
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 3:
        raise ValueError(f"share_scores: expected scores [turn, agent, question], got shape {scores.shape}")
    played = ~np.isnan(scores)
    if share == "all":
        counts = played.sum(1, keepdims=True)
        sums = np.where(played, scores, 0.0).sum(1, keepdims=True)
        team = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
        later = np.where(played, team, np.nan)
    else:
        later = scores
    if horizon == "current":
        return later
    if horizon == "last":
        return np.where(played, _last_played(later, played), np.nan)
    return _discounted(scores, later, played, discount)


def _last_played(values: np.ndarray, played: np.ndarray) -> np.ndarray:
    """For each agent and question, the value at the last turn that was played: [agent, question]."""
    turns = np.arange(values.shape[0])[:, None, None]
    last = np.where(played, turns, -1).max(0)
    return np.take_along_axis(values, np.maximum(last, 0)[None], axis=0)[0]


def _discounted(own: np.ndarray, later: np.ndarray, played: np.ndarray, discount: float) -> np.ndarray:
    credit = np.full(own.shape, np.nan)
    tail = np.zeros(own.shape[1:])
    weight = np.zeros(own.shape[1:])
    for turn in reversed(range(own.shape[0])):
        here = played[turn]
        total = np.where(here, own[turn], 0.0) + discount * tail
        norm = 1.0 + discount * weight
        credit[turn] = np.where(here, total / norm, np.nan)
        tail = np.where(here, np.where(here, later[turn], 0.0) + discount * tail, tail)
        weight = np.where(here, norm, weight)
    return credit
