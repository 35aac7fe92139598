"""What is charged comes off one role's credit after sharing, and where a credit came from."""

import pytest

from maporl import Dialogue, Example, RewardSection, Utterance
from maporl.config.schema import ChargeSection
from maporl.rewards import assign_credit
from maporl.rewards.credit import origins


def crew(section: RewardSection, **rewards) -> Dialogue:
    """A plan, an answer that was shown it, a check of that answer, and a second answer that was shown the check."""
    common = {"messages": [], "text": ""}
    said = [
        Utterance(0, "planner", "planner", 0, 0, answers=False, role="planner", **common),
        Utterance(1, "solver", "solver", 0, 1, parents=(0,), rewards={"label": 0.0, "score": 0.0}, **common),
        Utterance(2, "critic", "critic", 0, 2, parents=(1,), answers=False, role="critic", **common),
        Utterance(3, "solver", "solver", 1, 3, parents=(2,), rewards={"label": 1.0, "score": 1.0}, **common),
    ]
    for u in said:
        u.rewards |= {name: float(values[u.id]) for name, values in rewards.items()}
    dialogue = Dialogue(Example("q", "1+1=", "2"), said)
    assign_credit([dialogue], ("planner", "solver", "critic"), section)
    return dialogue


def credit(dialogue: Dialogue) -> list[float]:
    return [u.rewards["credit"] for u in dialogue.utterances]


def test_a_charge_comes_off_one_roles_credit_and_nobody_elses():
    words = {"words": [3, 4, 20, 2]}
    shared = credit(crew(RewardSection(discount=1.0), **words))
    assert shared == [0.5, 0.5, 1.0, 1.0]
    section = RewardSection(discount=1.0, charges={"words": ChargeSection(weight=0.01, roles=("critic",))})
    charged = crew(section, **words)
    assert credit(charged) == [0.5, 0.5, pytest.approx(0.8), 1.0]  # the critic keeps what the solver earned
    assert charged.utterances[2].rewards["charge/words"] == pytest.approx(-0.2)
    by_rule = RewardSection(rules=("last",), charges={"words": ChargeSection(weight=0.01, roles=("critic", "solver"))})
    assert credit(crew(by_rule, **words)) == pytest.approx([1.0, 0.96, 0.8, 0.98])  # agents are named too


def test_who_lacks_the_reward_pays_nothing_and_an_utterance_without_credit_stays_without():
    section = RewardSection(charges={"words": ChargeSection(weight=0.1)})
    dialogue = crew(RewardSection())
    dialogue.utterances[3].parents = ()  # nobody hears the critic any more
    dialogue.utterances[2].rewards["words"] = 5.0
    assign_credit([dialogue], ("planner", "solver", "critic"), section)
    assert "credit" not in dialogue.utterances[2].rewards
    assert not any("charge/words" in u.rewards for u in dialogue.utterances)


def test_origins_say_whose_score_a_credit_came_from():
    dialogue = crew(RewardSection(discount=0.5))
    agents = ("planner", "solver", "critic")
    parts = origins(dialogue, [dialogue], agents, RewardSection(discount=0.5), 1)
    # the first answer: (0 + 0.5 x 1) / 1.5, which the planner inherits
    third = pytest.approx(1 / 3)
    assert parts == {0: [(3, third)], 1: [(3, third)], 2: [(3, 1.0)], 3: [(3, 1.0)]}
    with_price = RewardSection(rules=("last", {"cost": {"per_token": 0.1}}))
    dialogue.utterances[3].response_ids = [1, 2]
    assign_credit([dialogue], agents, with_price)
    assert dialogue.utterances[3].rewards["credit"] == pytest.approx(0.8)
    assert origins(dialogue, [dialogue], agents, with_price, 1)[3] == [(3, 1.0)]  # the price of words is nobody's score


def test_origins_leave_the_credits_of_the_run_alone():
    section = RewardSection(discount=0.5, charges={"words": ChargeSection(weight=0.1)})
    dialogue = crew(section, words=[1, 1, 1, 1])
    before = [dict(u.rewards) for u in dialogue.utterances]
    origins(dialogue, [dialogue], ("planner", "solver", "critic"), section, 1)
    assert [u.rewards for u in dialogue.utterances] == before
