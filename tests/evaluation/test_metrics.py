"""Statistics of an update and of an evaluation."""

import math

import pytest

from maporl.evaluation.metrics import Evaluation, Share, evaluate_dialogues
from maporl.rewards.scoring import mean_rewards, reward_sums
from maporl.types import Dialogue, Example, Grade, Utterance


def dialogue(*turns, outcome=None):
    """``turns``: for each turn the answers of ann, bob, ...; "4" is right."""
    utterances = []
    for turn, answers in enumerate(turns):
        for agent, answer in zip(("ann", "bob", "cy"), answers, strict=False):
            grade = Grade(answer, answer == "4", "")
            utterances.append(Utterance(len(utterances), agent, agent, turn, turn, [], answer, grade=grade))
    return Dialogue(Example("e", "q", "4"), utterances, outcome)


def test_a_finished_question_keeps_its_answers_in_later_turns():
    result = evaluate_dialogues([dialogue("44", outcome="consensus"), dialogue("45", "55"), dialogue("55", "45")])
    assert [t.team.value for t in result.turns] == pytest.approx([0.5, 0.5])
    assert result.turns[1].agents["ann"] == Share(2, 3)
    assert result.finished == [pytest.approx(1 / 3), 0.0]
    metrics = result.metrics()
    assert metrics["finished/turn_1"] == pytest.approx(1 / 3)
    # of the four answers that went on, one improved and one declined
    assert (metrics["change/1_to_2/improved"], metrics["change/1_to_2/declined"], metrics["change/1_to_2/same"]) == (
        0.25,
        0.25,
        0.5,
    )
    assert Evaluation.from_json(result.to_json()) == result


def test_agents_that_answer_the_same_question_are_no_independent_samples_of_it():
    result = evaluate_dialogues([dialogue("44")] * 5 + [dialogue("55")] * 5)
    turn = result.turns[0]
    assert turn.team.interval() == turn.agents["ann"].interval()
    assert turn.team.total == 10


def test_rewards_are_logged_by_agent_and_turn_and_penalties_counted():
    played = dialogue("45", "44")
    for u, bonus in zip(played.utterances, (0.0, -1.0, 0.5, 1.0), strict=True):
        u.rewards = {"bonus": bonus}
    played.utterances[1].rewards["penalty/no_eos"] = -0.1
    metrics = mean_rewards([reward_sums([played])])
    assert metrics["reward/bonus"] == 0.125 and metrics["reward/bonus/ann"] == 0.25
    assert metrics["reward/bonus/bob/turn_2"] == 1.0
    assert metrics["reward/penalty/no_eos/bob/turn_1"] == -0.1
    assert {k: v for k, v in metrics.items() if k.startswith("count/")} == {
        "count/penalty/no_eos": 1.0, "count/penalty/no_eos/bob": 1.0, "count/penalty/no_eos/bob/turn_1": 1.0,
    }  # fmt: skip


def test_the_wilson_interval_of_nothing_is_unknown():
    assert all(math.isnan(x) for x in Share(0, 0).interval())
