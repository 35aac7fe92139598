"""Cross-play: its numbers by hand."""

import json

import pytest
from tiny_runs import TWO, played

from maporl.studies.crossplay.result import CrossPlay, seatings


def test_the_matrix_and_the_gap_of_two_runs():
    play = played(TWO)
    assert [[cell.value for cell in row] for row in play.matrix()] == [[0.875, 0.5], [0.375, 0.75]]
    assert play.matrix()[0][0].total == 4
    assert (play.self_play().value, play.cross_play().value) == (0.8125, 0.4375)
    # by question: 1 - .5, .5 - 0, 1 - 1, .75 - .25; mean .375, standard deviation .25, 1.96 * .25 / 2 = .245
    gap = play.gap()
    assert (gap.mean, round(gap.low, 4), round(gap.high, 4), gap.sign) == (0.375, 0.13, 0.62, 1)
    # (ann of one, bob of two) against the mean of both own teams: -.5, -.5, 0, -.25
    assert play.against_own_teams(play.teams[1]).mean == -0.3125


def test_skills_that_add_up_leave_no_gap():
    """Good agents raise the rows and columns of the matrix, and this is not taken for being used to each other."""
    first, second, third = (0.1, 0.3, 0.0), (0.5, 0.2, 0.4), (0.0, 0.2, 0.1)
    for seats in (2, 3):
        skills = (first, second, third)[:seats]
        for most in (64, 0):
            teams = seatings(3, seats, most)
            results = {t: (sum(skills[s][r] for s, r in enumerate(t)),) * 2 for t in teams}
            names = ("ann", "bob", "cat")[:seats]
            assert abs(played(results, ("a", "b", "c"), names).gap().mean) < 1e-12


def test_with_three_seats_a_cell_is_the_mean_over_the_seat_that_is_replaced():
    results = dict.fromkeys(seatings(2, 3), (0.0,)) | {(1, 0, 0): (0.3,), (0, 1, 0): (0.6,), (0, 0, 1): (0.9,)}
    play = played(results | {(0, 0, 0): (1.0,)}, seats=("ann", "bob", "cat"))
    assert [[round(cell.value, 12) for cell in row] for row in play.matrix()] == [[1.0, 0.6], [0.0, 0.0]]


def test_the_number_of_teams_is_bounded():
    assert len(seatings(4, 3)) == 64 and len(seatings(5, 3)) == 5 + 5 * 4 * 3
    assert len(seatings(9, 2)) == 81, "with two seats, one of them replaced is everything"
    assert (0, 0, 1, 2) not in seatings(3, 4, most=80) and (0, 0, 1, 2) in seatings(3, 4, most=81)


def test_questions_that_cannot_be_graded_are_left_out_of_what_they_belong_to():
    play = played(TWO | {(0, 1): (None, 0.0, 1.0, 0.5)})
    assert (play.cell(0, 1).count, play.cell(0, 1).total) == (1.5, 3)
    assert play.self_play().total == 4 and play.cross_play().total == 3
    assert play.gap().mean == pytest.approx((0.5 + 0.0 + 0.5) / 3)
    with pytest.raises(ValueError, match="expected a question on which all teams' answers can be graded, got none"):
        played(TWO | {(0, 0): (None, 1.0, 1.0, 1.0), (1, 1): (1.0, None, None, None)})


def test_the_json_form_comes_back_and_a_damaged_one_is_refused():
    play = played(TWO, temperature=0.7, seed=3, left_out=5)
    record = json.loads(json.dumps(play.to_json()))
    assert CrossPlay.from_json(record) == play
    assert record["proves_nothing"] == play.proves_nothing() != "" and record["gap"]["mean"] == 0.375
    assert record["teams"][1]["against_own_teams"]["mean"] == -0.3125
    assert record["teams"][0]["against_own_teams"] is None and record["matrix"][1][0]["value"] == 0.375
    with pytest.raises(ValueError, match=r"but \(1, 0\) was not played"):
        CrossPlay.from_json(record | {"teams": [t for t in record["teams"] if t["runs"] != [1, 0]]})
    with pytest.raises(ValueError, match="different numbers of answers"):
        CrossPlay.from_json(record | {"teams": [*record["teams"][:3], {"runs": [1, 1], "right": [1.0]}]})
    shared = [{**record, "teams": [team | {"survives": share} for team in record["teams"]]} for share in (0.25, 2.0)]
    assert CrossPlay.from_json(shared[0]).teams[0].survives == 0.25
    with pytest.raises(ValueError, match="shares of right answers, and of time, from 0 to 1"):
        CrossPlay.from_json(shared[1])
