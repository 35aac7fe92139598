"""What an update's dialogues show of a verifier: its scores of right and of wrong answers."""

import logging

import pytest

from maporl.environments.world import World
from maporl.training.dialogue_metrics import dialogue_metrics, mention_equal_scores
from maporl.types import Dialogue, Example, Grade, Utterance


def answer(correct, **rewards):
    """An answer that the grader finds right, wrong or neither."""
    return Utterance(0, "ann", "ann", 0, 0, [], "", grade=Grade("1", correct, ""), rewards=rewards)


def scores_by_label(*utterances):
    found = dialogue_metrics([Dialogue(Example("q", "?", "1"), [u]) for u in utterances], World(), ())
    return {name: value for name, value in found.items() if name.startswith("verifier/")}


def test_a_verifiers_scores_are_told_apart_by_what_the_grader_says():
    answers = [answer(True, verifier=0.75), answer(False, verifier=0.5), answer(False, verifier=0.25)]
    unknown = answer(None, verifier=1.0)
    assert scores_by_label(*answers, unknown) == {
        "verifier/on_right": 0.75, "verifier/on_wrong": 0.375, "verifier/spread": pytest.approx(0.2795, abs=1e-4),
    }  # fmt: skip
    assert scores_by_label(answer(True, verifier=0.5)) == {"verifier/on_right": 0.5}
    assert scores_by_label(answer(True, label=1.0)) == {} == scores_by_label(unknown)


def test_a_verifier_that_scores_all_answers_alike_is_warned_of_unless_it_is_to_learn(caplog):
    alike = scores_by_label(answer(True, verifier=0.5), answer(False, verifier=0.5004))
    assert alike["verifier/spread"] == pytest.approx(2e-4)
    for metrics, learns, said in (
        (alike, False, True),
        (alike, True, False),
        ({"verifier/spread": 0.1}, False, False),
        ({}, False, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            mention_equal_scores(metrics | {"reward/verifier": 0.5002}, learns)
        assert (
            "nearly the same score (0.5002 on average, with a standard deviation of 2.0e-04)" in caplog.text
        ) is said
