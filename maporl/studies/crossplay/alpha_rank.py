"""alpha-Rank: which teams survive where seats are refilled by what earns more (Omidshafiei et al. 2019, 1903.01373).

Behind each of two seats is a population of players, all of which play alike. Now and then a player of another run
turns up in one of them, and either its kind takes the population over or it dies out. The stationary distribution of
this Markov chain over teams ranks them. No torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from maporl.studies.crossplay.result import CrossPlay

ALPHA = 1.0
POPULATION = 50
"""With these, a team changes into one that is 10 points worse exp(-4.9), or 1/134, times as often as the other way."""

Table = Sequence[Sequence[float]] | NDArray[np.float64]


def log_fixation(gain: NDArray[np.float64], alpha: float, population: int) -> NDArray[np.float64]:
    """Return the logarithm of the probability that one newcomer, which earns ``gain`` more, takes over a population.

    It is ``(1 - exp(-alpha gain)) / (1 - exp(-population alpha gain))``, and 1 / population without a gain.

    >>> np.exp(log_fixation(np.array([-0.1, 0.0, 0.1]), 10.0, 2)).round(4).tolist()
    [0.2689, 0.5, 0.7311]
    """
    size = np.maximum(alpha * np.abs(gain), 1e-12)  # below this, the ratio is 1 / population in float64
    lost = np.minimum(0.0, (population - 1) * alpha * gain)
    return lost + np.log(-np.expm1(-size)) - np.log(-np.expm1(-population * size))


def alpha_rank(first: Table, second: Table, alpha: float = ALPHA, population: int = POPULATION) -> NDArray[np.float64]:
    """Return the share of time that evolution spends with each pair of players, as a table that sums to 1.

    Args:
        first: what the player of the first seat earns, on average, by the players of the first seat (rows) and of the
            second (columns).
        second: the same of the player of the second seat. In a team that is paid together both tables are equal.
        alpha: the ranking intensity. With 0 all pairs are equally likely, and the larger it is, the rarer is a
            change to what earns less.
        population: the number of players in the population of a seat, at least 2.

    Raises:
        ValueError: the tables are not finite tables of one shape, or ``alpha`` or ``population`` is out of range.
    """
    paid = np.array([first, second], dtype=float)
    if paid.ndim != 3 or not paid.size or not np.isfinite(paid).all():
        raise ValueError(f"expected two tables of finite payoffs, got shape {paid.shape}")
    if not (0 <= alpha < np.inf and population >= 2):
        raise ValueError(f"expected alpha >= 0 and population >= 2, got {alpha} and {population}")
    pairs = list(product(*map(range, paid.shape[1:])))
    rates = np.full((len(pairs), len(pairs)), -np.inf)
    for (here, old), (there, new) in product(enumerate(pairs), repeat=2):
        changed = [seat for seat in (0, 1) if old[seat] != new[seat]]
        if len(changed) == 1:
            gain = paid[(changed[0], *new)] - paid[(changed[0], *old)]
            rates[here, there] = log_fixation(gain, alpha, population)
    return np.exp(_log_stationary(rates)).reshape(paid.shape[1:])


def _log_stationary(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the stationary distribution of a chain with these logarithms of rates.

    States are eliminated one by one (Grassmann, Taksar and Heyman 1985), without a subtraction and in logarithms,
    because the probabilities of steps down underflow where ``alpha`` is large.
    """
    rates, states = rates.copy(), len(rates)
    for k in range(states - 1, 0, -1):
        rates[:k, k] -= np.logaddexp.reduce(rates[k, :k])
        rates[:k, :k] = np.logaddexp(rates[:k, :k], rates[:k, k, None] + rates[k, :k])
    share = np.zeros(states)
    for k in range(1, states):
        share[k] = np.logaddexp.reduce(share[:k] + rates[:k, k])
    return share - np.logaddexp.reduce(share)


def with_survival(play: CrossPlay) -> CrossPlay:
    """Return a cross-play in which each team has its share of :func:`alpha_rank`, paid by its accuracy.

    It is unchanged if it has more than two seats, or a team none of whose answers could be graded.
    """
    cells = [[cell.value for cell in row] for row in play.matrix()]
    if len(play.seats) != 2 or any(value is None for row in cells for value in row):
        return play
    shares = alpha_rank(np.array(cells, float), np.array(cells, float))
    return replace(play, teams=tuple(replace(team, survives=float(shares[team.runs])) for team in play.teams))
