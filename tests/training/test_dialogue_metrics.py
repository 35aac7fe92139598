"""What an update's dialogues show of a verifier: its scores of right and of wrong answers."""

import pytest

from maporl.environments.world import World
from maporl.training.dialogue_metrics import dialogue_metrics
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
