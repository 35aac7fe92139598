"""What a debate shows and when it ends: feedback, consensus, the summariser; restating."""

import pytest
from scripted_dialogues import EXAMPLE, TASK, graded, play_debates, scored

from maporl import Debate
from maporl.protocols.debate import Consensus, Feedback
from maporl.rollout.restate import restate
from maporl.types import Dialogue, Example, Grade, Utterance


def test_feedback_tells_the_author_its_own_score_and_the_others_that_of_what_they_read():
    protocol = Debate(turns=2, later="{others}|{question}", quote="{name}: {text}", feedback="label")
    _, prompts = play_debates(protocol, {"ann": ["4", "4"], "bob": ["5", "4"]}, referee=graded)
    assert prompts["ann"] == [
        "2+2=",
        "Your last answer was scored 1.000 out of 1.0: it is likely right. The score estimates the probability that an "
        "answer is right. It can be mistaken.\n\n"
        "bob: 5\nThis answer was scored 0.000 out of 1.0: it is very likely wrong.|2+2=",
    ]
    assert prompts["bob"][1].startswith("Your last answer was scored 0.000 out of 1.0: it is very likely wrong.")


@pytest.mark.parametrize(
    ("score", "words"),
    [(0.0, "very likely wrong"), (0.3, "may be wrong"), (0.6, "seems right"), (0.799, "seems right"), (0.8, "likely right")],
)  # fmt: skip
def test_verdicts_change_at_the_thresholds(score, words):
    assert words in Feedback().verdict(score)


def test_all_words_of_feedback_can_be_replaced():
    words = Feedback(verdicts=[(0.5, "bad"), (1.0, "good")], own="{verdict}!", others="({verdict})", explanation="")
    protocol = Debate(turns=2, later="{others}", quote="{text}", feedback="label", words=words)
    _, prompts = play_debates(protocol, {"ann": ["4", "4"], "bob": ["5", "4"]}, referee=graded)
    assert prompts["ann"][1] == "good!\n\n5\n(bad)"


def answered(answers, scores):
    return [
        Utterance(i, f"a{i}", "p", 0, 0, [], "", grade=Grade(a, None, ""), rewards={"score": s})
        for i, (a, s) in enumerate(zip(answers, scores, strict=True))
    ]


@pytest.mark.parametrize(
    ("answers", "scores", "share", "score", "reached"),
    [
        (["4", "4", "5"], [0.7, 0.7, 0.0], 2 / 3, 0.7, True),  # both limits are met exactly
        (["4", "4", "5"], [0.7, 0.6, 1.0], 2 / 3, 0.7, False),
        (["4", "4", "5"], [1.0, 1.0, 1.0], 0.7, 0.0, False),
        (["4", "4", "4"], [1.0, 1.0, 1.0], 1.0, 1.0, True),
        ([None, None, None], [1.0, 1.0, 1.0], 0.1, 0.0, False),  # what cannot be read agrees with nothing
        (["4", "5"], [0.0, 1.0], 0.5, 0.9, True),  # of two equal camps, one is sure
    ],
)
def test_consensus_needs_share_and_mean_score_both_at_least(answers, scores, share, score, reached):
    assert Consensus(share, score).reached(answered(answers, scores)) is reached


def test_a_finished_question_is_asked_no_more_and_the_others_go_on():
    other = Example("f", "3+3=", "6")
    protocol = Debate(turns=3, consensus=Consensus(1.0, 1.0))
    script = {"ann": ["4", "6", "6"], "bob": ["4", "6", "6"]}
    dialogues, prompts = play_debates(protocol, script, referee=scored, examples=(EXAMPLE, other))
    assert [(d.turns(), d.outcome) for d in dialogues] == [(1, "consensus"), (2, "consensus")]
    assert len(prompts["ann"]) == 3


@pytest.mark.parametrize(("end_above", "turns"), [(None, 3), (1.0, 3), (0.5, 2), (0.49, 1)])
def test_a_debate_ends_after_a_turn_whose_mean_score_is_above_a_bound(end_above, turns):
    """One of two is right, then both are."""
    script = {"ann": ["4", "4", "4"], "bob": ["5", "4", "4"]}
    protocol = Debate(turns=3, end_above=end_above)
    (dialogue,), _ = play_debates(protocol, script, referee=scored)
    assert (dialogue.turns(), dialogue.outcome) == (turns, None if turns == 3 else "enough")
    assert protocol.score_between_turns is (end_above is not None)
    (dialogue,), _ = play_debates(protocol.in_evaluation(), script, referee=scored)
    assert dialogue.turns() == 3


def test_consensus_waits_for_its_first_update():
    protocol = Debate(consensus=Consensus(from_update=5))
    assert protocol.at_update(4).consensus is None and protocol.at_update(5) is protocol


def test_a_summariser_condenses_the_others_for_each_agent_and_answers_nothing_itself():
    protocol = Debate(
        turns=2, later="{others}|{question}", quote="{name}: {text}", summariser="sam", summary="{others}?{question}"
    )
    script = {"ann": ["4", "4"], "bob": ["5", "4"], "sam": ["bob says five", "ann says four"]}
    (dialogue,), prompts = play_debates(protocol, script, agents=("ann", "bob", "sam"), referee=scored)
    assert prompts["sam"] == ["bob: 5?2+2=", "ann: 4?2+2="]
    assert prompts["ann"][1] == "bob says five|2+2=" and prompts["bob"][1] == "ann says four|2+2="
    summaries = [u for u in dialogue.utterances if u.agent == "sam"]
    assert [(u.answers, u.grade, u.parents) for u in summaries] == [(False, None, (1,)), (False, None, (0,))]
    assert [u.parents for u in dialogue.at(1)] == [(summaries[0].id,), (summaries[1].id,)]


def test_an_agent_alone_is_asked_to_reconsider():
    _, prompts = play_debates(Debate(turns=2, alone="again: {question}"), {"ann": ["5", "4"]}, agents=("ann",))
    assert prompts["ann"][1] == "again: 2+2="


def test_restating_asks_once_more_in_other_words_and_only_where_no_answer_is_found():
    asked = []

    def say(policy, conversations, most):
        asked.append((policy, [c[-1]["content"] for c in conversations], most))
        return ["hm" if len(asked) == 1 else "4" for _ in conversations]

    unread = Utterance(0, "ann", "ann", 0, 0, [], "I think it is four", response_ids=[1])
    read = Utterance(1, "bob", "bob", 0, 0, [], "4", response_ids=[1])
    restate([Dialogue(EXAMPLE, [unread, read])], TASK, say)
    assert unread.words() == "I think it is four\nAnswer: 4" and read.restated is None
    assert [a[0] for a in asked] == ["ann", "ann"] and asked[0][2] == 15
    assert asked[0][1] != asked[1][1] and all("Answer: <number>" in a[1][0] for a in asked)
    assert TASK.grade(EXAMPLE, unread.words()).correct


def test_restating_gives_up_after_its_tries():
    unread = Utterance(0, "ann", "ann", 0, 0, [], "no idea", response_ids=[1])
    tries = []
    restate([Dialogue(EXAMPLE, [unread])], TASK, lambda policy, conversations, most: tries.append(1) or ["never"])
    assert unread.restated is None and len(tries) <= 5
