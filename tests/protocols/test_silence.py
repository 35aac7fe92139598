"""Agents that stay silent in some turns (``speaks``), and answers by which agents decline (``pass``)."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scripted_dialogues import TASK, graded, play_debates, scored
from tiny_runs import config_of

from maporl import Ask, CallReturn, Chain, Debate, Protocol
from maporl.config.schema import PenaltySection, RewardSection
from maporl.engines.scripted import ScriptedEngine
from maporl.errors import ConfigError
from maporl.evaluation.metrics import Flips, evaluate_dialogues
from maporl.protocols import build_protocol
from maporl.protocols.debate import Consensus
from maporl.report.counts import answers_again
from maporl.rewards.credit import assign_credit
from maporl.rewards.shaping import collaboration_bonus
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.runs.build import build_trainer
from maporl.types import from_json, to_json
from trl_ext.ppo.options import GREEDY

TEXTS = {
    "later": "{others}|{question}",
    "alone": "alone|{question}",
    "quote": "{number}{name}={text}",
    "separator": ",",
}
TEAM = ("ann", "bob", "cy")


def said(dialogue):
    return [(u.agent, u.turn, u.text, u.parents) for u in dialogue.utterances]


def credits(dialogue, agents=("ann", "bob"), **reward):
    section = RewardSection(**reward)
    scored([dialogue])
    assign_credit([dialogue], agents, section)
    return [u.rewards.get("credit") for u in dialogue.utterances]


def test_a_silent_debater_is_then_shown_the_last_answer_of_each_other():
    protocol = Debate(turns=3, speaks={"bob": (1, 3), "cy": (1, 2)}, **TEXTS)
    script = {"ann": ["1", "4", "4"], "bob": ["2", None, "5"], "cy": ["3", "6"]}
    [dialogue], prompts = play_debates(protocol, script, TEAM)
    assert prompts == {
        "ann": ["2+2=", "1bob=2,2cy=3|2+2=", "1cy=6|2+2="],
        "bob": ["2+2=", "1ann=4,2cy=6|2+2="],
        "cy": ["2+2=", "1ann=1,2bob=2|2+2="],
    }
    assert said(dialogue) == [
        ("ann", 0, "1", ()),
        ("bob", 0, "2", ()),
        ("cy", 0, "3", ()),
        ("ann", 1, "4", (1, 2)),
        ("cy", 1, "6", (0, 1)),
        ("ann", 2, "4", (4,)),
        ("bob", 2, "5", (3, 4)),
    ]
    assert from_json(to_json(dialogue)) == dialogue


def test_an_older_answer_is_shown_if_its_author_was_silent_since():
    protocol = Debate(turns=3, speaks={"bob": (1, 3), "cy": (1,)}, **TEXTS)
    _, prompts = play_debates(protocol, {"ann": ["1", "4", "4"], "bob": ["2", None, "5"], "cy": ["3"]}, TEAM)
    assert prompts["bob"][1] == "1ann=4,2cy=3|2+2=" and prompts["ann"][2] == "alone|2+2="


def test_who_begins_later_is_shown_what_was_said():
    _, prompts = play_debates(Debate(turns=2, speaks={"bob": (2,)}, **TEXTS), {"ann": ["1", "4"], "bob": [None, "5"]})
    assert prompts == {"ann": ["2+2=", "alone|2+2="], "bob": ["1ann=1|2+2="]}


def test_a_score_is_told_to_its_author_when_it_speaks_again():
    words = {"own": "{score:.0f}!", "others": "({score:.0f})", "explanation": ""}
    protocol = Debate(turns=3, speaks={"bob": (1, 3)}, feedback="label", **TEXTS)
    protocol = replace(protocol, words=replace(protocol.words, **words))
    script = {"ann": ["4", "5", "4"], "bob": ["4", None, "4"]}
    _, prompts = play_debates(protocol, script, referee=graded)
    assert prompts["bob"][1] == "1!\n\n1ann=5\n(0)|2+2="
    assert prompts["ann"][2] == "0!\n\nalone|2+2="


def test_a_summary_is_asked_for_those_who_heard_something_new():
    protocol = Debate(turns=3, speaks={"bob": (1, 3)}, summariser="sum", summary="{others}|{question}", **TEXTS)
    script = {"ann": ["1", "4", "4"], "bob": ["2", None, "5"], "sum": ["two", "four"]}
    [dialogue], prompts = play_debates(protocol, script, ("ann", "bob", "sum"))
    assert prompts["sum"] == ["1bob=2|2+2=", "1ann=4|2+2="]
    assert prompts["ann"] == ["2+2=", "two|2+2=", "alone|2+2="] and prompts["bob"] == ["2+2=", "four|2+2="]
    assert [(u.agent, u.turn, u.parents) for u in dialogue.utterances[5:]] == [("ann", 2, ()), ("bob", 2, (4,))]


def test_consensus_counts_who_answered_in_the_turn():
    agree = Consensus(share=1.0, score=0.5)
    alone = Debate(turns=3, speaks={"bob": (1, 3)}, consensus=agree, **TEXTS)
    [dialogue], _ = play_debates(alone, {"ann": ["5", "4", "4"], "bob": ["4", None, "4"]}, referee=scored)
    assert dialogue.outcome == "consensus" and [u.turn for u in dialogue.utterances] == [0, 0, 1]
    passing = Debate(turns=2, pass_="PASS", consensus=agree, **TEXTS)
    [dialogue], _ = play_debates(passing, {"ann": ["4", "4"], "bob": ["PASS", "4"]}, referee=scored)
    assert dialogue.outcome == "consensus" and len(dialogue.utterances) == 2
    [dialogue], _ = play_debates(passing, {"ann": ["PASS", "4"], "bob": ["PASS", "5"]}, referee=scored)
    assert dialogue.outcome is None and len(dialogue.utterances) == 4  # nobody agreed on anything


def test_a_chain_leaves_agents_out_of_rounds():
    chain = Chain(turns=3, speaks={"bob": (1, 3)}, later="{others}|{question}", quote="{name}={text}", separator=",")
    [dialogue], prompts = play_debates(chain, {"ann": ["1", "2", "3"], "bob": ["4", None, "5"]})
    assert prompts == {"ann": ["2+2=", "bob=4|2+2=", "2+2="], "bob": ["ann=1|2+2=", "ann=2,ann=3|2+2="]}
    assert [(u.agent, u.turn, u.order) for u in dialogue.utterances] == [
        ("ann", 0, 0),
        ("bob", 0, 1),
        ("ann", 1, 2),
        ("ann", 2, 3),
        ("bob", 2, 4),
    ]


def test_a_pass_is_shown_to_nobody_and_not_graded():
    protocol = Debate(turns=3, pass_="PASS", **TEXTS)
    [dialogue], prompts = play_debates(
        protocol, {"ann": ["1", " PASS\n", "4"], "bob": ["2", "4", "PASS?"]}, referee=graded
    )  # PASS? is an answer
    assert prompts["bob"] == ["2+2=", "1ann=1|2+2=", "alone|2+2="]
    assert prompts["ann"] == ["2+2=", "1bob=2|2+2=", "1bob=4|2+2="]
    assert [(u.answers, u.tags, u.grade is None) for u in dialogue.utterances] == [
        (True, {}, False),
        (True, {}, False),
        (False, {"passed": True}, True),
        (True, {}, False),
        (True, {}, False),
        (True, {}, False),
    ]
    chain = Chain(turns=2, pass_="PASS", visibility="predecessor", later="{others}", quote="{name}={text}")
    [dialogue], prompts = play_debates(chain, {"ann": ["1", "PASS"], "bob": ["PASS", "4"], "cy": ["3", "6"]}, TEAM)
    assert prompts["cy"] == ["ann=1", "bob=4"] and prompts["bob"] == ["ann=1", "cy=3"]
    assert [u.parents for u in dialogue.utterances] == [(), (0,), (0,), (2,), (2,), (4,)]


def test_who_passes_has_the_mean_credit_of_the_answers_of_its_turn():
    script = {"ann": ["4", "PASS"], "bob": ["5", "4"], "cy": ["PASS", "5"]}
    [dialogue], _ = play_debates(Debate(turns=2, pass_="PASS", **TEXTS), script, TEAM)
    assert credits(dialogue, TEAM, share="individual", horizon="current") == [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
    assert "score" not in dialogue.utterances[2].rewards
    [dialogue], _ = play_debates(Debate(turns=2, pass_="PASS", **TEXTS), script, TEAM)
    penalties = PenaltySection(
        mode="subtract", too_short=0.5, min_tokens=2, no_final_answer=0.0, repetition=0.0, no_eos=0.0
    )
    for u in dialogue.utterances:
        u.response_ids = [1]
    with_penalties = credits(dialogue, TEAM, share="individual", horizon="current", penalties=penalties)
    assert with_penalties == [0.5, -0.5, 0.0, 0.0, 0.5, -0.5]
    assert not any(name.startswith("penalty") for name in dialogue.utterances[2].rewards)


def test_who_is_silent_at_the_end_is_paid_for_the_answers_that_it_influenced():
    # ann and bob answer 1 and 0; bob alone speaks in turn 2 and is right, and ann alone in turn 3 and is wrong
    protocol = Debate(turns=3, speaks={"ann": (1, 3), "bob": (1, 2)}, **TEXTS)
    told = {}
    for horizon in ("current", "last", "discounted_sum"):
        for share in ("all", "individual"):
            [dialogue], _ = play_debates(protocol, {"ann": ["4", None, "5"], "bob": ["5", "4", None]})
            told[horizon, share] = credits(dialogue, share=share, horizon=horizon, discount=0.5)
    assert [(u.agent, u.turn) for u in dialogue.utterances] == [("ann", 0), ("bob", 0), ("bob", 1), ("ann", 2)]
    assert told["current", "all"] == [0.5, 0.5, 1.0, 0.0]
    assert told["last", "all"] == [0.0, 0.0, 0.0, 0.0]
    assert told["last", "individual"] == [0.0, 1.0, 1.0, 0.0]
    # (1 + 0.5 * 1 + 0.25 * 0) / 1.75, (0 + 0.5 * 1 + 0.25 * 0) / 1.75, (1 + 0.5 * 0) / 1.5, 0
    assert told["discounted_sum", "all"] == pytest.approx([6 / 7, 2 / 7, 2 / 3, 0.0])
    # (1 + 0.5 * 0) / 1.5, (0 + 0.5 * 1) / 1.5, 1, 0
    assert told["discounted_sum", "individual"] == pytest.approx([2 / 3, 1 / 3, 1.0, 0.0])


def test_a_turn_in_which_all_pass_has_no_credit_but_that_of_rules():
    script = {"ann": ["4", "PASS"], "bob": ["5", "PASS"]}
    [dialogue], _ = play_debates(Debate(turns=2, pass_="PASS", **TEXTS), script)
    assert credits(dialogue) == [1.0, 0.0, None, None]
    [dialogue], _ = play_debates(Debate(turns=2, pass_="PASS", **TEXTS), script)
    assert credits(dialogue, rules=("team_mean",)) == [0.5, 0.5, 0.5, 0.5]


def test_silence_is_a_missing_cell_of_every_statistic():
    protocol = Debate(turns=3, speaks={"bob": (1, 3)}, **TEXTS)
    [one], _ = play_debates(protocol, {"ann": ["4", "5", "4"], "bob": ["5", None, "4"]})
    graded([one])
    found = evaluate_dialogues([one])
    assert [{name: (s.count, s.total) for name, s in t.agents.items()} for t in found.turns] == [
        {"ann": (1, 1), "bob": (0, 1)},
        {"ann": (0, 1)},
        {"ann": (1, 1), "bob": (1, 1)},
    ]
    assert [(t.majority.count, t.majority.total) for t in found.turns] == [(0.5, 1), (0.0, 1), (1.0, 1)]
    assert found.flips == [Flips(0, 1, 0, 0, 1), Flips(1, 0, 0, 0, 1)]  # ann's; bob was silent next to his answers
    assert [(*answer[:2], answer[3]) for answer in answers_again(one)] == [
        ("ann", True, False),
        ("ann", False, True),
        ("bob", False, True),
    ]


def test_a_bonus_counts_no_move_of_who_was_silent():
    nan = math.nan
    correct = np.array([[[1.0], [0.0]], [[0.0], [nan]], [[1.0], [1.0]]])
    found = collaboration_bonus(correct, (1.0, 2.0, 4.0, 8.0))
    # bob's wrong answer made ann wrong (alpha[0] for her, alpha[3] for him); when she moved back, nobody had spoken
    np.testing.assert_array_equal(found[:, 0, 0], [0.0, -1.0, 0.0])
    np.testing.assert_array_equal(found[:, 1, 0], [-8.0, nan, 0.0])


def test_forks_repeat_silence_and_passes():
    protocol = Debate(turns=3, speaks={"bob": (1, 3)}, pass_="PASS", **TEXTS)
    script = {"ann": ["1", "PASS", "4"], "bob": ["PASS", None, "5"]}
    specs = {name: SpeakerSpec("scripted", (name, f"{name}2", f"{name}3")) for name in ("ann", "bob")}
    engines = {"scripted": ScriptedEngine(lambda request: script[request.ask.agent][request.turn])}
    driver = RolloutDriver(TASK, protocol, specs, engines, GREEDY)
    trunk = driver.open(TASK[0], 0)
    forks = []
    while not trunk.over:
        forks.append(driver.fork(trunk, 1 + len(forks)))
        driver.step([trunk])
    driver.finish(forks)
    for fork in forks:
        assert said(fork.dialogue) == said(trunk.dialogue)
        assert [u.tags for u in fork.dialogue.utterances] == [u.tags for u in trunk.dialogue.utterances]
        assert [u.answers for u in fork.dialogue.utterances] == [True, False, False, True, True]
        assert [u.messages for u in fork.dialogue.utterances] == [u.messages for u in trunk.dialogue.utterances]
    assert [u.policy for u in trunk.dialogue.utterances] == ["ann", "bob", "ann2", "ann3", "bob3"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"speaks": {"bob": [1, 4]}},
            "speaks.bob: expected rising turns from 1 to 3, as [1], got [1, 4]",
        ),
        ({"speaks": {"bob": [2, 1]}}, "speaks.bob: expected rising"),
        ({"speaks": {"ann": [1], "bob": [1, 3]}}, "nobody speaks in turn 2; let one of ['ann', 'bob']"),
        ({"speaks": {"dora": [1]}}, "agent: unknown 'dora'; known: ann, bob"),
        ({"pass": " PASS"}, "pass: expected a word without spaces around it, such as PASS, got ' PASS'"),
        ({"pass": ""}, "pass: expected a word"),
    ],
)
@pytest.mark.parametrize("name", ["debate", "chain"])
def test_what_cannot_be_played_is_refused(name, section, message):
    with pytest.raises(ConfigError) as caught:
        build_protocol({"name": name, "turns": 3, **section}, ("ann", "bob"))
    assert message in str(caught.value)


def test_more_that_cannot_be_played():
    with pytest.raises(ValueError, match="'sum' is the summariser, which does not debate itself"):
        Debate(summariser="sum", speaks={"sum": (1,)})
    with pytest.raises(ValueError, match="it counts rounds, but order"):
        Chain(turns=2, order=("ann", "bob", "ann"), speaks={"bob": (1,)})
    with pytest.raises(ConfigError, match="unknown key 'pass'"):
        build_protocol({"name": "refine", "pass": "PASS"}, ("ann", "bob"))


def test_a_configuration_calls_it_pass():
    protocol = build_protocol({"name": "debate", "speaks": {"bob": [1]}, "pass": "PASS"}, ("ann", "bob"))
    assert protocol == Debate(speaks={"bob": (1,)}, pass_="PASS")
    assert Debate().every_step_scored and not protocol.every_step_scored
    assert Chain().every_step_scored and not Chain(pass_="PASS").every_step_scored


class Backwards(Protocol):
    def play(self, example, agents):
        yield [Ask("ann", [{"role": "user", "content": "?"}], turn=2)]
        yield [Ask("ann", [{"role": "user", "content": "?"}], turn=1)]


def test_turns_must_rise():
    with pytest.raises(ConfigError, match="asks agent 'ann' for turn=1, below 3; leave turn out"):
        play_debates(Backwards(), {"ann": ["", "", "x"]})


def test_a_worker_that_nobody_calls_says_nothing():
    protocol = CallReturn(plan="{question}", returned="said {reply}")
    [dialogue], prompts = play_debates(protocol, {"ann": ["4"], "bob": []})
    assert prompts["bob"] == [] and [u.agent for u in dialogue.utterances] == ["ann"]
    assert credits(dialogue) == [1.0]
    assert set(evaluate_dialogues([dialogue]).turns[0].agents) == {"ann"}


def test_a_team_with_silence_and_passes_is_trained(tmp_path):
    protocol = {"name": "debate", "turns": 3, "later": "{others};{question}", "alone": "{question}", "quote": "{text}",
                "speaks": {"bob": [1, 3]}, "pass": "5"}  # fmt: skip
    reward = {"bonus": {"alpha": [1, 1, 1, 1]}}
    evaluation = {"questions": 8}
    ppo = {"response_length": 1, "temperature": 1.0}
    sections = {"protocol": protocol, "reward": reward, "evaluation": evaluation, "ppo": ppo}
    config = config_of(tmp_path, updates=2, sections=sections, save_steps=0)
    trainer = build_trainer(config, quiet=True)
    batches = []
    score = trainer.player.scorer.credit

    def kept(dialogues, task, update):
        score(dialogues, task, update)
        batches.extend(dialogues)

    trainer.player.scorer.credit = kept
    trainer.train()
    spoken = [u for d in batches for u in d.utterances]
    assert {(u.agent, u.turn) for u in spoken} == {("ann", 0), ("ann", 1), ("ann", 2), ("bob", 0), ("bob", 2)}
    assert all(math.isfinite(u.rewards["credit"]) for u in spoken if "credit" in u.rewards)
    assert {u.text == "5" for u in spoken} == {True, False}
    assert all(u.tags.get("passed", False) == (u.text == "5") for u in spoken)
