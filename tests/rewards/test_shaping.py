"""The rules of shared scores and the bonus against the golden cases of the original, and what these lack by hand."""

import json

import numpy as np
import pytest
from folders import GOLDEN

from maporl.rewards.credit import repeats
from maporl.rewards.shaping import collaboration_bonus, share_scores

NUMBERS = GOLDEN / "maporl_rewards.json"
NAN = np.nan


def test_unknown_rules_and_shapes_are_refused():
    with pytest.raises(ValueError, match="horizon is one of"):
        share_scores(np.zeros((1, 1, 1)), "next")
    with pytest.raises(ValueError, match=r"expected scores \[turn, agent, question\], got shape \(2, 2\)"):
        share_scores(np.zeros((2, 2)))


def test_all_golden_cases_of_the_score_rule_agree_cell_by_cell():
    cases = [c for c in json.loads(NUMBERS.read_text())["cases"] if c["kind"] == "score_rule"]
    assert len(cases) == 80
    for case in cases:
        got = share_scores(
            _array(case["scores"]), case["rule"]["horizon"], case["rule"]["agent_share"], case["discount"]
        )
        np.testing.assert_allclose(got, _array(case["clean_expected"]), atol=2e-5, err_msg=case["id"])


def _array(values):
    return np.array([[[NAN if v is None else v for v in row] for row in turn] for turn in values], dtype=float)


# -- the collaboration bonus --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [(1, 1, 1), (1, 1, 1, 1, 1), (1, 1, 1, float("nan"))])
def test_alpha_is_exactly_four_finite_numbers(alpha):
    with pytest.raises(ValueError, match="alpha: expected four finite numbers"):
        collaboration_bonus(np.zeros((2, 2, 1)), alpha)


@pytest.mark.parametrize(("mode", "expected"), [("upstream", "clean_expected"), ("paper", "paper_expected")])
def test_all_bonus_and_combined_golden_cases_in_both_modes(mode, expected):
    cases = [c for c in json.loads(NUMBERS.read_text())["cases"] if c["kind"] != "score_rule"]
    assert len(cases) == 70
    for case in cases:
        correct = _array(case["scores"] if case["kind"] == "bonus_rule" else case["correctness"])
        limits = case["thresholds"]
        result = collaboration_bonus(correct, case["alpha"], mode, limits["correct"], limits["wrong"])
        if case["kind"] == "combined":
            rule = case["rule"]
            result += share_scores(_array(case["scores"]), rule["horizon"], rule["agent_share"], case["discount"])
        np.testing.assert_allclose(result, _array(case[expected]), atol=2e-5, err_msg=f"{case['id']} {mode}")


def test_a_tie_among_the_others_is_no_majority():
    moves = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])[:, :, None]
    assert collaboration_bonus(moves, (1.0, 2.0, 4.0, 8.0))[1, 0, 0] == 0.0


# -- repetition ---------------------------------------------------------------------------------------------------


def test_repetition_agrees_with_the_plain_definition_on_random_answers():
    def plain(ids, exempt):
        return any(
            all(ids[i + k * n : i + (k + 1) * n] == ids[i : i + n] for k in range(4))
            and not set(ids[i : i + n]) <= exempt
            for n in range(1, 21)
            for i in range(len(ids) - 4 * n + 1)
        )

    rng = np.random.default_rng(0)
    answers = [rng.integers(0, 3, rng.integers(0, 60)).tolist() for _ in range(400)]
    exempt = [{int(rng.integers(0, 3))} for _ in answers]
    found = repeats(answers, exempt).tolist()
    assert found == [plain(a, e) for a, e in zip(answers, exempt, strict=True)]
    assert 0.1 < np.mean(found) < 0.9
