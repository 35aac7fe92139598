"""What calls of tools cost the completions that made them."""

import pytest
from played_games import EXAMPLES, TASK, buys, by_turns, driver_of, spec

from maporl.config.schema import PenaltySection, RewardSection
from maporl.environments.world import World
from maporl.rewards.build import build_sources
from maporl.rewards.credit import assign_credit
from maporl.rewards.scoring import score_dialogues
from maporl.types import Call, Result, Utterance

NONE = {"too_short": 0, "no_final_answer": 0, "repetition": 0, "no_eos": 0}


def credits(**penalties):
    """The credits of ann, who makes a good call, a broken one and a failing one, and of bob, who makes none."""
    world = World(environments={"shop": spec()})
    script = by_turns(ann=[buys(1), "<call>{broken</call>", buys('"no"'), "4"], bob=["4"])
    dialogues = driver_of(script, world).play(EXAMPLES[:1])
    reward = RewardSection(share="individual", horizon="current", penalties=PenaltySection(**NONE, **penalties))
    for u in (u for d in dialogues for u in d.utterances):
        u.rewards = {}
    score_dialogues(dialogues, TASK, build_sources(reward, ["label"]), {"label": 1.0})
    assign_credit(dialogues, ("ann", "bob"), reward)
    return dialogues[0].utterances


@pytest.mark.parametrize(("penalties", "expected"), [
    ({}, [1, 1, 1, 1]),
    ({"call": 0.1}, [0.9, 0.9, 0.9, 1]),
    ({"call_unread": 0.2}, [1, 0.8, 1, 1]),
    ({"call_failed": 0.3}, [1, 1, 0.7, 1]),
    ({"call": 0.1, "call_unread": 0.2, "call_failed": 0.3, "mode": "replace"}, [0.9, 0.7, 0.6, 1]),
])  # fmt: skip
def test_a_call_costs_its_completion_and_no_other(penalties, expected):
    said = credits(**penalties)
    assert [u.rewards["credit"] for u in said if u.agent == "ann"] == pytest.approx(expected)
    assert [u.rewards["credit"] for u in said if u.agent == "bob"] == [1]
    paid = {name: value for u in said for name, value in u.rewards.items() if name.startswith("penalty/")}
    assert set(paid) == {f"penalty/{name}" for name in penalties if name != "mode"}


def test_an_environment_that_was_lost_costs_nobody():
    from maporl.rewards.credit import penalise_calls

    calls = [Call("0.0", "buy", {}, "shop", Result("gone", error="lost")), Call("0.1", "add", {}, None, Result("5"))]
    u = Utterance(id=0, agent="ann", policy="ann", turn=0, order=0, messages=[], text="")
    u.calls, u.rewards = calls, {"credit": 1.0}
    penalise_calls([u], PenaltySection(**NONE, call=0.1, call_failed=0.5))
    assert u.rewards == {"credit": pytest.approx(0.8), "penalty/call": pytest.approx(-0.2)}
