"""Rules that turn scores into credit: pure numpy on arrays ``[turn, agent, question]``, NaN where not played."""

from collections.abc import Sequence

import numpy as np

HORIZONS = ("current", "last", "discounted_sum")
SHARES = ("individual", "all")
BONUS_MODES = ("paper", "upstream")


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


def collaboration_bonus(
    correct: np.ndarray, alpha: Sequence[float], mode: str = "paper", right: float = 0.5, wrong: float = 0.5
) -> np.ndarray:
    """The incentives to collaborate (MAPoRL, arXiv 2502.18439, sec. 3 and its incentive table).

    Let C be ``correct`` [turn, agent, question] (1 right, 0 wrong; a value above ``right`` counts as right, below
    ``wrong`` as wrong, between as neither), O the mean of C over the *other* agents, and let side(x) be +1, -1 or 0
    for right, wrong, neither. The bonus of agent a at turn t is the sum of two terms:

    - *own revision*, for t >= 1, where s = side(C[t]) and side(C[t-1]) = -s:
      ``s * alpha[0]`` if side(O[t-1]) = s, ``s * alpha[1]`` if side(O[t-1]) = -s or the agent is alone, else 0;
    - *influence*, where d = side(O[t+1]) and side(O[t]) = -d, and m = side(C[t]) is not 0:
      ``d * alpha[3]`` if m = d, ``d * alpha[2]`` if m = -d.

    So ``alpha[0]`` rewards being persuaded by a correct majority (and costs as much when a wrong one persuades);
    ``alpha[1]`` rewards becoming right against a wrong majority; ``alpha[2]`` rewards a wrong answer from which the
    others nevertheless became right; ``alpha[3]`` rewards persuading the others while right. In the paper's names they
    are alpha1, alpha0, beta0, beta1.

    ``mode="paper"`` is the above. ``mode="upstream"`` does what the published code does: the influence term has the
    opposite sign, and turn 0 has none. A mean of the others between the thresholds (one half each, say) is no
    majority: nothing moved to or from it. NaN where not played, in and out; a turn that was not played moves nobody.
    """
    if mode not in BONUS_MODES:
        raise ValueError(f"collaboration_bonus: mode must be one of {BONUS_MODES}, got {mode!r}")
    weights = np.asarray(alpha, dtype=float)
    if weights.shape != (4,) or not np.isfinite(weights).all():
        raise ValueError(f"collaboration_bonus: alpha: expected four finite numbers, got {list(alpha)!r}")
    correct = np.asarray(correct, dtype=float)
    if correct.ndim != 3:
        raise ValueError(f"collaboration_bonus: expected correct [turn, agent, question], got shape {correct.shape}")
    mine = _side(correct, right, wrong)
    theirs = _side(_mean_of_others(correct), right, wrong)
    bonus = np.zeros(correct.shape)
    before, after = mine[:-1], mine[1:]
    moved = np.where(before == -after, after, 0)
    alone = correct.shape[1] == 1
    persuaded = np.where(theirs[:-1] == after, weights[0], np.where(theirs[:-1] == -after, weights[1], 0.0))
    bonus[1:] += moved * (weights[1] if alone else persuaded)
    turned = np.where(theirs[:-1] == -theirs[1:], theirs[1:], 0)
    influence = turned * np.where(mine[:-1] == turned, weights[3], np.where(mine[:-1] == -turned, weights[2], 0.0))
    if mode == "upstream":
        influence = -influence
        influence[:1] = 0.0
    bonus[:-1] += influence
    return np.where(np.isnan(correct), np.nan, bonus)


def _side(values: np.ndarray, right: float, wrong: float) -> np.ndarray:
    """+1 right, -1 wrong, 0 neither or not played."""
    return np.where(values > right, 1, 0) - np.where(values < wrong, 1, 0)


def _mean_of_others(values: np.ndarray) -> np.ndarray:
    """For each agent the mean over the other agents that played; NaN where there was none."""
    played = ~np.isnan(values)
    filled = np.where(played, values, 0.0)
    counts = played.sum(1, keepdims=True) - played
    sums = filled.sum(1, keepdims=True) - filled
    return np.divide(sums, counts, out=np.full(values.shape, np.nan), where=counts > 0)
