"""The six rules of shared scores, by hand and against the golden cases of the original."""

import json
from pathlib import Path

import numpy as np
import pytest

from maporl.rewards.shaping import HORIZONS, SHARES, share_scores

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "maporl_rewards.json"
NAN = np.nan


def test_the_six_rules_by_hand():
    # one question, two agents, two turns; g = 0.5, so the sum is divided by 1.5
    scores = np.array([[[1.0], [0.0]], [[0.0], [1.0]]])
    expected = {
        ("current", "individual"): [[1.0, 0.0], [0.0, 1.0]],
        ("current", "all"): [[0.5, 0.5], [0.5, 0.5]],
        ("last", "individual"): [[0.0, 1.0], [0.0, 1.0]],
        ("last", "all"): [[0.5, 0.5], [0.5, 0.5]],
        ("discounted_sum", "individual"): [[2 / 3, 1 / 3], [0.0, 1.0]],
        ("discounted_sum", "all"): [[2.5 / 3, 0.5 / 3], [0.0, 1.0]],
    }
    for (horizon, share), values in expected.items():
        np.testing.assert_allclose(
            share_scores(scores, horizon, share, 0.5)[:, :, 0], values, err_msg=f"{horizon} {share}"
        )


def test_a_question_that_ends_early_is_credited_up_to_its_last_turn_and_stays_nan_after():
    scores = np.array([[[1.0], [0.0]], [[NAN], [NAN]]])
    for horizon in HORIZONS:
        for share in SHARES:
            credit = share_scores(scores, horizon, share)
            expected = [0.5, 0.5] if share == "all" and horizon != "discounted_sum" else [1.0, 0.0]
            assert credit[0, :, 0].tolist() == expected and np.isnan(credit[1]).all()


def test_unknown_rules_and_shapes_are_refused():
    with pytest.raises(ValueError, match="horizon must be one of"):
        share_scores(np.zeros((1, 1, 1)), "next")
    with pytest.raises(ValueError, match=r"expected scores \[turn, agent, question\], got shape \(2, 2\)"):
        share_scores(np.zeros((2, 2)))


@pytest.mark.skipif(not GOLDEN.exists(), reason="golden numbers are not in this checkout")
def test_all_golden_cases_of_the_score_rule_agree_cell_by_cell():
    cases = [c for c in json.loads(GOLDEN.read_text())["cases"] if c["kind"] == "score_rule"]
    assert len(cases) == 80
    for case in cases:
        got = share_scores(
            _array(case["scores"]), case["rule"]["horizon"], case["rule"]["agent_share"], case["discount"]
        )
        np.testing.assert_allclose(got, _array(case["clean_expected"]), atol=2e-5, err_msg=case["id"])


def _array(values):
    return np.array([[[NAN if v is None else v for v in row] for row in turn] for turn in values], dtype=float)
