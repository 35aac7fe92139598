"""Whole credit: penalties on the author alone, penalties that replace scores, the bonus, utterances without answers."""

from dataclasses import replace

import numpy as np
import pytest

from maporl import Arithmetic, Prompts
from maporl.config.schema import BonusSection, EnvironmentSection, PenaltySection, RewardSection
from maporl.environments.base import Environment
from maporl.environments.rooms import EnvironmentSpec, Room
from maporl.rewards import assign_credit
from maporl.rewards.functions import CompletionReward, with_functions
from maporl.rewards.labels import Brevity, is_verdict, majority, verdict
from maporl.types import Dialogue, Example, Grade, Stop, Utterance
from trl_ext.errors import ArgumentError

AGENTS = ("ann", "bob")


def utterance(number, agent, turn, score=0.0, ids=range(10), **fields):
    grade = Grade(str(score), bool(score), "")
    rewards = {"score": score}
    fields = {"grade": grade, "rewards": rewards, "order": turn, **fields}
    return Utterance(number, agent, agent, turn, messages=[], text="", response_ids=list(ids), **fields)


def credit_of(utterances, section, agents=AGENTS, digits=None):
    assign_credit([Dialogue(Example("e", "q", "a"), utterances)], agents, section, digits)
    return [u.rewards.get("credit") for u in utterances]


def test_each_penalty_is_taken_off_its_author_alone_and_kept_by_name():
    section = RewardSection(discount=1.0, penalties=PenaltySection(0.1, 5, 0.2, 0.4, 0.8))
    utterances = [
        utterance(0, "ann", 0, 1.0, ids=range(4)),
        utterance(1, "bob", 0, 0.0, grade=Grade(None, False, "")),
        utterance(2, "ann", 1, 1.0, ids=[3] * 6),
        utterance(3, "bob", 1, 0.0, stop=Stop.LENGTH),
    ]
    # shares: turn 1 (own + 0.5) / 2, turn 2 own
    assert credit_of(utterances, section) == pytest.approx([0.75 - 0.1, 0.25 - 0.2, 1.0 - 0.4, 0.0 - 0.8])
    names = [{n: v for n, v in u.rewards.items() if n.startswith("penalty/")} for u in utterances]
    assert names == [
        {"penalty/too_short": -0.1}, {"penalty/no_final_answer": -0.2}, {"penalty/repetition": -0.4}, {"penalty/no_eos": -0.8},
    ]  # fmt: skip


def test_replacing_the_score_as_the_original_did_reaches_teammates():
    section = RewardSection(discount=1.0, penalties=PenaltySection(10.0, 5, mode="replace"))
    utterances = [
        utterance(0, "ann", 0, 1.0),
        utterance(1, "bob", 0, 1.0),
        utterance(2, "ann", 1, 1.0, ids=[1]),
        utterance(3, "bob", 1, 1.0),
    ]
    assert credit_of(utterances, section) == pytest.approx([(1 - 4.5) / 2, (1 - 4.5) / 2, -10.0, 1.0])


def test_a_penalty_of_0_is_off_and_digits_may_repeat():
    section = RewardSection(penalties=PenaltySection(0, 5, 0, 0.4, 0))
    utterances = [utterance(0, "ann", 0, 1.0, ids=[1]), utterance(1, "bob", 0, 1.0, ids=[7] * 9, stop=Stop.LENGTH)]
    assert credit_of(utterances, section, digits={"bob": {7}}) == [1.0, 1.0]
    assert credit_of(utterances, section) == [1.0, 0.6]


def test_an_answer_that_had_to_be_restated_has_no_final_answer_of_its_own():
    section = RewardSection(penalties=PenaltySection(no_final_answer=0.25))
    assert credit_of([utterance(0, "ann", 0, 1.0, restated="Answer: 4")], section, ("ann",)) == [0.75]


def test_the_bonus_is_added_and_kept_by_name():
    section = RewardSection(horizon="current", share="individual", bonus=BonusSection([1.0, 2.0, 4.0, 8.0]))
    utterances = [
        utterance(0, "ann", 0, 1.0),
        utterance(1, "bob", 0, 0.0),
        utterance(2, "ann", 1, 1.0),
        utterance(3, "bob", 1, 1.0),
    ]
    # bob is persuaded by ann (alpha 0), which ann is paid for (alpha 3)
    assert credit_of(utterances, section) == [9.0, 0.0, 1.0, 2.0]
    assert [u.rewards["bonus"] for u in utterances] == [8.0, 0.0, 0.0, 1.0]


def test_words_that_are_no_answer_are_worth_what_they_helped_to_say():
    section = RewardSection(horizon="current", share="individual")
    summary = utterance(2, "sam", 0, answers=False, grade=None, rewards={}, parents=(1,))
    unread = utterance(5, "sam", 1, answers=False, grade=None, rewards={})
    utterances = [
        utterance(0, "ann", 0, 1.0), utterance(1, "bob", 0, 0.0), summary,
        utterance(3, "ann", 1, 1.0, parents=(2,)), utterance(4, "bob", 1, 0.5, parents=(2,)), unread,
    ]  # fmt: skip
    assert credit_of(utterances, section, (*AGENTS, "sam")) == [1.0, 0.0, 0.75, 1.0, 0.5, None]


def test_a_question_that_finished_early_is_credited_and_paid_up_to_its_last_turn():
    section = RewardSection(discount=1.0, bonus=BonusSection([1.0, 1.0, 1.0, 1.0]))
    early = Dialogue(Example("a", "q", "a"), [utterance(0, "ann", 0, 1.0), utterance(1, "bob", 0, 1.0)])
    late = Dialogue(
        Example("b", "q", "a"),
        [
            utterance(0, "ann", 0, 0.0),
            utterance(1, "bob", 0, 0.0),
            utterance(2, "ann", 1, 1.0),
            utterance(3, "bob", 1, 0.0),
        ],
    )
    assign_credit([early, late], AGENTS, section)
    assert [u.rewards["credit"] for u in early.utterances] == [1.0, 1.0]
    # ann becomes right against bob (alpha 1), after bob was wrong (alpha 2 to bob)
    assert [u.rewards["bonus"] for u in late.utterances] == [0.0, 1.0, 1.0, 0.0]
    assert np.isfinite([u.rewards["credit"] for u in late.utterances]).all()


def test_brevity_is_the_share_of_tokens_that_an_answer_spares():
    spoken = [
        utterance(0, "ann", 0, ids=range(2)),
        utterance(1, "bob", 0, ids=range(5)),
        utterance(2, "ann", 1, ids=[]),
    ]
    assert Brevity(4)([Dialogue(Example("e", "q", "a"), spoken)], None) == [[0.5, 0.0, None]]


def test_a_verdict_is_true_if_it_approves_a_right_draft_or_refuses_a_wrong_one():
    def judged(draft, approved, task=None):
        said = [
            Utterance(0, "ann", "solver", 0, 0, [], draft),
            Utterance(
                1, "bob", "bob", 0, 1, [], "", "verifier", parents=(0,), answers=False, settles=(0,) if approved else ()
            ),
        ]
        return verdict([Dialogue(Example("e", "1+3=", "4"), said)], task or Arithmetic(largest=9))[0]

    class Ungraded(Arithmetic):
        def grade(self, example, text):
            return Grade(text, None, "nobody knows")

    assert judged("4", True) == [None, 1.0] and judged("4", False) == [None, 0.0]
    assert judged("5", True) == [None, 0.0] and judged("5", False) == [None, 1.0]
    assert judged("4", True, Ungraded()) == [None, None], "a verdict on what has no grade is neither true nor false"


def test_a_function_with_a_parameter_that_nothing_fills_is_refused_when_it_is_given():
    with pytest.raises(ArgumentError, match=r"missing a required argument: 'colour'"):
        with_functions(RewardSection(), None, lambda prompts, completions, colour: [0.0], None, Arithmetic())


def test_a_reward_function_gets_the_environments_of_an_agent_but_for_lost_ones():
    def room(name, *agents, lost=False):
        spec = EnvironmentSpec(name, Environment, agents, EnvironmentSection(use="worlds:World"))
        return Room(spec, Environment(), 0, {}, {}, lost=lost)

    rooms = [room("shop", "ann", "bob"), room("bank", "ann"), room("mill", "ann", "bob", "cy", lost=True)]
    said = [utterance(number, agent, 0) for number, agent in enumerate(("ann", "bob", "cy"))]
    dialogue = Dialogue(Example("e", "q", "a"), said, environments={room.spec.name: room for room in rooms})
    seen = []

    def paid(completions, environments):
        seen.extend(environments)
        return [0.0] * len(completions)

    CompletionReward(paid)([dialogue], Arithmetic(largest=9))
    shop, bank, _ = (room.world for room in rooms)
    assert seen == [{"shop": shop, "bank": bank}, shop, None]


def test_a_majority_has_voters_of_all_debates_and_reads_no_label():
    """Two dialogues on one question and one on another, without labels. A hint and an ablation have no vote."""

    def debate(prompt, last, first="9", without=()):
        texts = [("ann", 0, first), ("bob", 0, "so I do not know"), *(("ab"[n], 1, t) for n, t in enumerate(last))]
        said = [utterance(n, agent, turn, grade=None) for n, (agent, turn, _) in enumerate(texts)]
        for u, (_, _, text) in zip(said, texts, strict=True):
            u.text = text
        hint = utterance(4, "ann", 1, grade=None, answers=False)
        return Dialogue(Example("e", f"question {prompt}", ""), [*said, hint], prompt=prompt, without=without)

    task = Prompts([{"prompt": "How many?"}])
    played = [
        debate(0, ["Answer: 4", "4"], first="Answer: 4.0"),
        debate(0, ["5", "4"]),
        debate(0, ["7", "7"], without=("ann",)),
        debate(1, ["1", "2"]),
    ]
    assert majority(played, task) == [
        [1.0, 0.0, 1.0, 1.0, None], [0.0, 0.0, 0.0, 1.0, None], [0.0, 0.0, 0.0, 0.0, None], [0.0, 0.0, 0.5, 0.5, None],
    ]  # fmt: skip
    assert majority([debate(2, ["so", "hm it is so"], first="so what")], task) == [[0.0, 0.0, 0.0, 0.0, None]]


@pytest.mark.parametrize(
    ("role", "answers", "parents"), [("solver", False, (0,)), ("verifier", True, (0,)), ("verifier", False, ())]
)
def test_only_a_verifier_that_was_shown_a_draft_and_does_not_answer_gives_a_verdict(role, answers, parents):
    said = Utterance(1, "bob", "bob", 0, 0, [], "right", role="verifier", answers=False, parents=(0,))
    assert is_verdict(said) and not is_verdict(replace(said, role=role, answers=answers, parents=parents))
