"""MAPoRL's rules that turn scores into credit, in pure numpy.

All arrays are ``[turn, agent, question]``. An entry is NaN if the agent did not speak in that turn of the question.
"""

from collections.abc import Sequence

import numpy as np

HORIZONS = ("current", "last", "discounted_sum")
SHARES = ("individual", "all")
BONUS_MODES = ("paper", "upstream")


def share_scores(
    scores: np.ndarray, horizon: str = "discounted_sum", share: str = "all", discount: float = 0.3
) -> np.ndarray:
    """Return the credit of each utterance from its own and later scores (MAPoRL, arXiv 2502.18439, sec. 3).

    The three horizons and two shares make six rules. Let V be ``scores`` [turn, agent, question], and let x(q) be the
    last turn in which question q was played. Let W[k] be V of the same agent (``individual``) or the mean over the
    agents that spoke (``all``) at turn k. Let g be ``discount``.

    - ``current``: W[t]
    - ``last``: W[x]
    - ``discounted_sum``: (V[t] + sum_{k=t+1..x} g^(k-t) W[k]) / sum_{k=t..x} g^(k-t)

    An agent that is silent in later turns has influenced who speaks there, so with ``all`` it gets their credit too.
    With ``individual``, turns and x are the agent's own, without those in which it is silent.

    ``discounted_sum`` with ``all`` is the paper's influence-aware reward. The division keeps it in the range of the
    scores. Cells that were not played are NaN in ``scores`` and in the result.

    Raises:
        ValueError: the horizon or the share has no such name, or ``scores`` does not have three dimensions.
    """
    if horizon not in HORIZONS or share not in SHARES:
        raise ValueError(f"share_scores: horizon is one of {HORIZONS}, share of {SHARES}, got {horizon!r}, {share!r}")
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 3:
        raise ValueError(f"share_scores: expected scores [turn, agent, question], got shape {scores.shape}")
    played = ~np.isnan(scores)
    if share == "all":
        counts = played.sum(1, keepdims=True)
        sums = np.where(played, scores, 0.0).sum(1, keepdims=True)
        team = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
        later = np.broadcast_to(team, scores.shape)
    else:
        later = scores
    if horizon == "discounted_sum":
        return _discounted(scores, later, played, discount)
    return np.where(played, later if horizon == "current" else _last(later), np.nan)


def _last(values: np.ndarray) -> np.ndarray:
    """Return the value at the last turn that has one, for each agent and question: [agent, question]."""
    turns = np.arange(values.shape[0])[:, None, None]
    last = np.where(np.isnan(values), -1, turns).max(0)
    return np.take_along_axis(values, np.maximum(last, 0)[None], axis=0)[0]


def _discounted(scores: np.ndarray, later: np.ndarray, played: np.ndarray, discount: float) -> np.ndarray:
    credit = np.full(scores.shape, np.nan)
    tail = np.zeros(scores.shape[1:])
    weight = np.zeros(scores.shape[1:])
    for turn in reversed(range(scores.shape[0])):
        norm = 1.0 + discount * weight
        credit[turn] = np.where(played[turn], (scores[turn] + discount * tail) / norm, np.nan)
        counts = ~np.isnan(later[turn])
        tail = np.where(counts, later[turn] + discount * tail, tail)
        weight = np.where(counts, norm, weight)
    return credit


def collaboration_bonus(
    correct: np.ndarray, alpha: Sequence[float], mode: str = "paper", right: float = 0.5, wrong: float = 0.5
) -> np.ndarray:
    """Return the incentives to collaborate (MAPoRL, arXiv 2502.18439, sec. 3 and its incentive table).

    Let C be ``correct`` [turn, agent, question], with 1 for right and 0 for wrong. A value above ``right`` counts as
    right, a value below ``wrong`` counts as wrong, and a value between counts as neither. Let O be the mean of C over
    the *other* agents. Let side(x) be +1 for right, -1 for wrong and 0 for neither. The bonus of an agent at turn t is
    the sum of two terms:

    - *own revision*, for t >= 1, if s = side(C[t]) and side(C[t-1]) = -s:
      ``s * alpha[0]`` if side(O[t-1]) = s, ``s * alpha[1]`` if side(O[t-1]) = -s or the agent is alone, else 0;
    - *influence*, if d = side(O[t+1]), side(O[t]) = -d, and m = side(C[t]) is not 0:
      ``d * alpha[3]`` if m = d, ``d * alpha[2]`` if m = -d.

    The four numbers mean:

    - ``alpha[0]`` rewards an agent that a right majority persuades. It costs as much if a wrong majority persuades it.
    - ``alpha[1]`` rewards an agent that becomes right against a wrong majority.
    - ``alpha[2]`` rewards a wrong answer from which the others nevertheless become right.
    - ``alpha[3]`` rewards an agent that persuades the others while it is right.

    The paper calls them alpha1, alpha0, beta0 and beta1.

    ``mode="paper"`` is the above. ``mode="upstream"`` follows the published code: the influence term has the opposite
    sign, and turn 0 has no influence term. A mean of the others between the thresholds (for example if half of them are
    right) is not a majority, so no move towards it or away from it counts. Cells that were not played are NaN in
    ``correct`` and in the result; they count as no move.

    Raises:
        ValueError: the mode has no such name, ``alpha`` is not four finite numbers, or ``correct`` does not have three
            dimensions.
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
    """Return +1 for right, -1 for wrong, and 0 for neither or not played."""
    return np.where(values > right, 1, 0) - np.where(values < wrong, 1, 0)


def _mean_of_others(values: np.ndarray) -> np.ndarray:
    """Return for each agent the mean over the other agents that played; NaN if no other agent played."""
    played = ~np.isnan(values)
    filled = np.where(played, values, 0.0)
    counts = played.sum(1, keepdims=True) - played
    sums = filled.sum(1, keepdims=True) - filled
    return np.divide(sums, counts, out=np.full(values.shape, np.nan), where=counts > 0)
