"""alpha-Rank of cross-play tables: known games by hand, and a second computation."""

import numpy as np
import pytest
from tiny_runs import TWO, played

from maporl.studies.crossplay.alpha_rank import alpha_rank, with_survival
from maporl.studies.crossplay.result import seatings

ROCK_PAPER_SCISSORS = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
ASYMMETRIC = np.array([[0.5, 0.1, 0.3], [0.2, 0.6, 0.4], [0.7, 0.0, 0.35]])
"""Three players in the first seat (rows), three in the second (columns)."""


def by_eigenvector(first, second, alpha, population):
    """The chain as the paper writes it, and the left eigenvector of 1 of its matrix of transitions."""
    pairs = [(row, column) for row in range(3) for column in range(3)]
    moves = np.zeros((9, 9))
    for here, (row, column) in enumerate(pairs):
        for there, (other, beside) in enumerate(pairs):
            if (row == other) == (column == beside):
                continue
            table = second if row == other else first
            gain = alpha * (table[other, beside] - table[row, column])
            fixed = 1 / population if gain == 0 else (1 - np.exp(-gain)) / (1 - np.exp(-population * gain))
            moves[here, there] = fixed / 4  # two other players for each of two seats
    moves += np.diag(1 - moves.sum(axis=1))
    values, vectors = np.linalg.eig(moves.T)
    share = vectors[:, np.argmin(abs(values - 1))].real
    return (share / share.sum()).reshape(3, 3)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 10.0, 1000.0])
def test_in_rock_paper_scissors_nobody_survives_more_than_others(alpha):
    shares = alpha_rank(ROCK_PAPER_SCISSORS, -ROCK_PAPER_SCISSORS, alpha)
    assert shares.sum(axis=0) == pytest.approx([1 / 3] * 3) and shares.sum(axis=1) == pytest.approx([1 / 3] * 3)


def test_what_earns_less_against_everybody_dies_out():
    table = np.array([[0.6, 0.5], [0.2, 0.1]])
    shares = alpha_rank(table, table, alpha=10.0)
    assert shares.round(6).tolist() == [[1.0, 0.0], [0.0, 0.0]] and 0 < shares[1].sum() < 1e-40
    assert alpha_rank(table, table, alpha=0.0) == pytest.approx(np.full((2, 2), 0.25))
    # a change for 0.1 less is made exp(-(population - 1) alpha 0.1) times as often as its reverse
    by_default = alpha_rank([[0.6], [0.5]], [[0.0], [0.0]])
    assert by_default[0, 0] / by_default[1, 0] == pytest.approx(134.29, abs=0.01)
    one_seat = alpha_rank([[0.6], [0.5]], [[0.0], [0.0]], alpha=10.0, population=3)
    assert one_seat[:, 0] == pytest.approx([1 / (1 + np.exp(-2)), np.exp(-2) / (1 + np.exp(-2))])


def test_an_asymmetric_game_is_ranked_as_by_an_eigenvector():
    shares = alpha_rank(ASYMMETRIC, 1 - ASYMMETRIC.T, alpha=2.0, population=4)
    assert shares == pytest.approx(by_eigenvector(ASYMMETRIC, 1 - ASYMMETRIC.T, 2.0, 4))
    assert shares.round(4).tolist() == [[0.0812, 0.0966, 0.047], [0.0679, 0.076, 0.2145], [0.2379, 0.0537, 0.1252]]
    # two teams that each lose if one agent is replaced, however large alpha is: the one that is better survives
    shares = alpha_rank(ASYMMETRIC, ASYMMETRIC, alpha=1e4)
    assert np.isfinite(shares).all() and shares[2, 0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        (([[0.0, np.nan]], [[0.0, 0.0]]), {}, "two tables of finite payoffs"),
        (([0.0], [0.0]), {}, "two tables of finite payoffs"),
        (([[0.0]], [[0.0]]), {"alpha": -1.0}, "alpha >= 0"),
        (([[0.0]], [[0.0]]), {"population": 1}, "population >= 2"),
    ],
)
def test_what_cannot_be_ranked_is_refused(tables, options, message):
    with pytest.raises(ValueError, match=message):
        alpha_rank(*tables, **options)


def test_a_cross_play_of_two_seats_is_ranked_by_its_matrix():
    # [[.875, .5], [.375, .75]]: both own teams lose if one agent is replaced, and the better one survives
    shares = {team.runs: round(team.survives, 4) for team in with_survival(played(TWO)).teams}
    assert shares == {(0, 0): 0.9978, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 0.0022}
    three = played(dict.fromkeys(seatings(2, 3), (1.0,)), seats=("ann", "bob", "cat"))
    assert with_survival(three) == three
