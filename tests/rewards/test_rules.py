"""Reward rules with the published methods' worked numbers."""

import pytest
from scripted_dialogues import apply, dialogue

from maporl.errors import ConfigError
from maporl.rewards.rules import build_rules
from maporl.types import Dialogue, Example, Utterance

CHAIN = dialogue(("a", 0, [], {}), ("b", 0, [0], {}))


def test_cory_gives_both_the_sum():
    assert apply("sum", [CHAIN], [{0: 1.2, 1: 2.0}]) == [{0: 3.2, 1: 3.2}]


def test_means_over_a_dialogue_or_over_each_turn():
    debate = dialogue(("a", 0, [], {}), ("b", 0, [], {}), ("a", 1, [], {}), ("b", 1, [], {}))
    scores = {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert apply("team_mean", [debate], [scores]) == [dict.fromkeys(range(4), 0.75)]
    assert apply({"team_mean": {"over": "turn"}}, [debate], [scores]) == [{0: 0.5, 1: 0.5, 2: 1.0, 3: 1.0}]


def test_agentpo_pays_the_collaborator_what_the_actor_earns_and_marft_only_the_last():
    assert apply("last", [CHAIN], [{1: 1.0}]) == [{0: 1.0, 1: 1.0}]
    assert apply({"last": {"to": "itself"}}, [CHAIN], [{0: 0.3, 1: 1.0}]) == [{0: 0.0, 1: 1.0}]


def test_the_outcome_may_end_what_each_agent_did():
    """Ann's second word, bob's and cy's only ones earn the last score, whoever has it.

    Nobody earns what nobody scored.
    """
    agents = dict(enumerate(["ann", "bob", "ann", "cy"]))
    played = Dialogue(Example("e", "q", "a"), [Utterance(i, a, a, 0, i, [], "") for i, a in agents.items()])
    assert apply({"last": {"to": "ends"}}, [played], [{1: 0.3, 2: 0.7}]) == [{0: 0.0, 1: 0.7, 2: 0.7, 3: 0.7}]
    assert apply({"last": {"to": "ends"}}, [played], [{}]) == [{}]
    assert apply("last", [CHAIN], [{}]) == [{}]


def test_of_those_who_speak_last_at_once_nobody_is_last():
    said = [("ann", 0), ("bob", 0), ("ann", 1), ("bob", 1)]
    debate = Dialogue(Example("e", "q", "a"), [Utterance(i, a, a, t, t, [], "") for i, (a, t) in enumerate(said)])
    scores = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5}
    assert (
        apply("last", [debate], [scores]) == apply("tree_mean", [debate], [scores]) == [dict.fromkeys(range(4), 0.75)]
    )
    assert apply({"last": {"to": "itself"}}, [debate], [scores]) == [{0: 0.0, 1: 0.0, 2: 1.0, 3: 0.5}]
    assert apply({"last": {"to": "ends"}}, [debate], [scores]) == [{0: 0.0, 1: 0.0, 2: 0.75, 3: 0.75}]
    assert apply("last", [debate], [{2: 0.5}]) == [dict.fromkeys(range(4), 0.5)], "bob's score could not be read"


@pytest.mark.parametrize(("tau", "solver", "evaluator"), [(3, 1.0, 0.0), (2, 0.5, 0.5), (1, 0.0, 1.0)])
def test_comas_splits_one_point(tau, solver, evaluator):
    forum = dialogue(("a", 0, [], {"role": "solver"}), ("b", 0, [0], {"role": "evaluator"}))
    got = apply({"complement": {"roles": ["evaluator"]}}, [forum], [{0: (tau - 1) / 2}])
    assert got == [{0: solver, 1: evaluator}]


def test_zero_sum_compares_totals():
    game = dialogue(("a", 0, [], {}), ("b", 0, [], {}), ("a", 1, [], {}))
    assert apply("zero_sum", [game], [{0: 1.0, 1: 0.5, 2: 2.0}]) == [{0: 2.5, 1: -2.5, 2: 2.5}]


def test_mhgpo_propagates_back_over_consumers():
    """Answerers with F1 .5 and 1 consumed reranking 1, which gets .75; rerankings .75 and .25 consumed the rewriting:
    .5."""
    search = dialogue(
        ("w", 0, [], {}), ("r", 0, [0], {}), ("r", 1, [0], {}), ("x", 0, [1], {}), ("x", 1, [1], {}), ("x", 2, [2], {})
    )
    scores = {3: 0.5, 4: 1.0, 5: 0.25}
    assert apply("back_propagate", [search], [scores]) == [{**scores, 1: 0.75, 2: 0.25, 0: 0.5}]
    assert apply({"back_propagate": {"how": "max"}}, [search], [scores])[0][0] == 1.0
    formatted = apply({"back_propagate": {"how": "sum", "keep_own": True}}, [search], [{**scores, 1: -0.1}])[0]
    assert formatted[1] == pytest.approx(1.4) and formatted[0] == pytest.approx(1.65)


def test_malt_values_what_dialogues_share_by_the_mean_of_their_leaves():
    first, second = (dialogue(("g", 0, [], {"sample": 7}), ("v", 0, [0], {}), rollout=r) for r in range(2))
    assert apply("tree_mean", [first, second], [{1: 1.0}, {1: 0.0}]) == [{0: 0.5, 1: 1.0}, {0: 0.5, 1: 0.0}]


def test_matpo_mixes_accuracy_and_formats_and_workers_inherit():
    """acc (1,0,1,0), planner's format (1,1,1,0), mean of the workers' (1,.5,0,1) -> R = (1, .075, .95, .05)."""
    mix = {"mix": {"credit": 0.9, "weights": {"format": 0.05, "callees/format": 0.05}, "roles": ["planner"]}}
    for acc, main, subs, expected in (
        (1, 1, [1, 1], 1.0), (0, 1, [1, 0], 0.075), (1, 1, [0, 0], 0.95), (0, 0, [1, 1], 0.05),
    ):  # fmt: skip
        called = dialogue(
            ("p", 0, [], {"role": "planner", "rewards": {"format": main}}),
            *(("w", i, [], {"role": "worker", "caller": 0, "rewards": {"format": s}}) for i, s in enumerate(subs)),
        )
        mixed = apply(mix, [called], [{0: acc}])
        assert mixed[0][0] == pytest.approx(expected)
        assert apply("inherit", [called], mixed)[0] == pytest.approx(dict.fromkeys(range(3), expected))


def test_a_constant_makes_a_cost_of_a_form_and_fades_with_it():
    mix = {"mix": {"weights": {"form": 0.1}, "roles": ["v"], "constant": -0.1, "fade": 2}}
    said = dialogue(*((r, 0, [], {"role": r, "rewards": {"form": f}}) for r, f in (("v", 1.0), ("v", 0.0), ("s", 0.0))))
    for update, cost in ((1, 0.1), (2, 0.05), (3, 0.0)):
        (rule,) = build_rules([mix], update=update)
        assert rule([said], [{0: 1.0, 1: 1.0, 2: 1.0}])[0] == pytest.approx({0: 1.0, 1: 1.0 - cost, 2: 1.0})


def test_the_last_score_may_be_missing():
    silent = dialogue(("a", 0, [], {}), ("b", 1, [0], {}))
    assert apply("last", [silent], [{}]) == [{}]
    assert apply({"last": {"missing": -1.0}}, [silent], [{}]) == [{0: -1.0, 1: -1.0}]
    assert apply({"last": {"missing": -1.0}}, [silent], [{0: 0.5}]) == [{0: 0.5, 1: 0.5}]


def test_m_grpo_pays_a_sub_agent_for_format_its_main_agents_result_and_an_experts_view():
    called = dialogue(
        ("m", 0, [], {"rewards": {"label": 1.0}}),
        ("s", 0, [], {"role": "worker", "caller": 0, "rewards": {"format": 1.0, "judge": 0.6}}),
    )
    weights = {"format": 0.1, "caller/label": 0.4, "judge": 0.5}
    got = apply({"mix": {"credit": 0.0, "weights": weights, "roles": ["worker"]}}, [called], [{0: 1.0}])
    assert got[0][1] == pytest.approx(0.8)


def test_words_cost():
    played = dialogue(("a", 0, [], {"response_ids": [1] * 50}))
    assert apply({"cost": {"per_token": 0.01}}, [played], [{0: 1.0}]) == [{0: 0.5}]
    assert apply({"cost": {"per_token": 0.01, "most": 0.2}}, [played], [{0: 1.0}]) == [{0: 0.8}]


def test_rules_compose_from_left_to_right_and_faults_are_named():
    rules = build_rules(["sum", {"cost": {"per_token": 0.0}}, "own"])
    credits = [{0: 1.0, 1: 0.5}]
    for rule in rules:
        credits = rule([CHAIN], credits)
    assert credits == [{0: 1.5, 1: 1.5}]
    with pytest.raises(ConfigError, match=r"reward\.rules: unknown 'summ'; did you mean 'sum'"):
        build_rules(["summ"])
    with pytest.raises(ConfigError, match=r"reward\.rules\.cost: unknown key 'pertoken'"):
        build_rules([{"cost": {"pertoken": 1}}])
    with pytest.raises(ConfigError, match=r"expected a name or one \{name: options\}"):
        build_rules([{"sum": {}, "own": {}}])
