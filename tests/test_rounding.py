"""What is equal but for rounding is equal: no rule, builder of rows or advantage decides by the last bit of a mean."""

import itertools
import math
import random

import pytest
import torch
from scripted_training import played, recipe_values, scripted_trainer

from maporl.advantages.batch import TurnBatch
from maporl.advantages.estimator import estimate, estimate_all
from maporl.config.schema import AdvantageConfig
from maporl.loops.pairs import Gap
from maporl.methods.arenarl import eliminate
from maporl.methods.ccpo import Counterfactual
from maporl.methods.g_ra import Gate
from maporl.methods.mac_spgg import PublicGoods
from maporl.methods.ssl import Tier
from maporl.rewards.counterfactual import shapley_values
from maporl.rewards.rules import build_rules
from maporl.rewards.scoring import with_reward_variance
from maporl.rounding import LEAST, ROUNDING, deviations, differ, difference, exceeds
from maporl.training.assign import group_spreads
from maporl.types import Dialogue, Example, Grade, Utterance

ONE, OTHER = 0.1 + 0.2, 0.3
"""Equal but for rounding."""


def a_value(rng):
    size = rng.choice((rng.uniform(0.01, 5), rng.randint(1, 9) / 10, rng.uniform(0.1, 1) * 10.0 ** rng.randint(-4, 6)))
    return size * rng.choice((1, 1, -1))


@pytest.mark.parametrize("seed", range(5))
def test_equal_values_deviate_by_exactly_nothing_and_others_by_what_they_do(seed):
    rng = random.Random(seed)
    for _ in range(200):
        value, count = a_value(rng), rng.randint(1, 12)
        near = [value * (1 + rng.choice((0, 1, -1)) * 2**-52) for _ in range(count)]
        assert deviations(near) == [0.0] * count and not differ(near)
        assert difference(near[0], near[-1]) == 0.0 and not exceeds(near[0], near[-1])
        other = [a_value(rng) for _ in range(count)]
        mean = math.fsum(other) / count
        assert deviations(other) == pytest.approx(
            [v - mean for v in other], abs=2 * ROUNDING * max(map(abs, other)) + LEAST
        )
        assert exceeds(value + 1e-6 * abs(value), value) and not exceeds(value, value + 1e-6 * abs(value))


def role_dialogues(role, rights):
    graded = [Grade("1", right, "") for right in rights]
    said = [[Utterance(0, role, "prover", 0, 0, [], "", grade=grade)] for grade in graded]
    return [Dialogue(Example("e", "q", "a"), own, rollout=n) for n, own in enumerate(said)]


@pytest.mark.parametrize("role", ["helpful", "sneaky"])
def test_no_prover_is_above_the_mean_where_all_are_scored_equally(role):
    rng = random.Random(0)
    (rule,) = build_rules([{"prove": {"form": "src"}}])
    above = 0
    for count in range(1, 12):
        for _ in range(50):
            score = rng.random()
            paid = rule(role_dialogues(role, [True, False] * count), [{0: score}] * (2 * count))
            assert paid == [{0: -1.0}] * (2 * count)
            logit = math.log(score / (1 - score))
            above += logit > sum([logit] * (2 * count)) / (2 * count)
    assert above > 20, "a mean that is rounded lies below some of these"


def test_equally_convincing_answers_teach_a_prover_nothing_through_the_trainer(tmp_path):
    values = recipe_values(
        "prover_verifier", tmp_path, branching={"group": 3}, training={"per_device_train_batch_size": 8}
    )
    trainer = scripted_trainer(values, lambda request: str(request.rng_key[-2]))
    source = trainer.player.scorer.sources["verifier"]
    source.score = lambda dialogues, task: [[0.1 + d.prompt / 10 for _ in d.utterances] for d in dialogues]
    batch = played(trainer)
    found = [u.rewards["credit"] for d in batch.dialogues for u in d.utterances]
    assert len(found) == 8 * 3 * 2 and set(found) == {-1.0}


COMPARED = [
    {"baseline": baseline, "scale": scale, "key": key, "post": post, "eps": 0.0}
    for baseline, scale, key, post in itertools.product(
        ("mean", "loo", "max", "batch_mean"),
        ("none", "std", "batch_std", "raw_std", "agent_std", "token_std"),
        (("prompt",), ()),
        ((), ("drop_zeros",), ("whiten",)),
    )
]


@pytest.mark.parametrize("options", COMPARED, ids=lambda o: "-".join(map(str, o.values())))
def test_equal_returns_earn_exactly_nothing_whatever_compares_them(options):
    """Also without an eps, which would hide that a deviation of 1e-17 divides a difference of 1e-17."""
    rng = random.Random(0)
    config = AdvantageConfig(returns="utterance", **options)
    for number in range(10):
        value = rng.choice((ONE, a_value(rng)))
        near = [value * (1 + rng.choice((0, 1, -1)) * 2**-52) for _ in range(6)] if number % 2 else [value] * 6
        batch = TurnBatch(
            reward=near,
            prompt=["q"] * 6,
            rollout=list(range(6)),
            agent=["a", "b"] * 3,
            turn=[0] * 6,
            tokens=[1, 2, 3] * 2,
        )
        found = estimate_all(batch, config)
        assert found.advantages.tolist() == [0.0] * 6
        assert found.weights.tolist() == [0.0 if options["post"] == ("drop_zeros",) else 1.0] * 6


def test_what_is_left_of_sums_that_cancel_is_nothing():
    left = ONE - OTHER
    assert 0 < left < LEAST and not exceeds(left, 0.0) and not differ([left, 0.0, -left])
    assert deviations([left, 0.0, 0.0]) == [0.0] * 3
    batch = TurnBatch(reward=[left, 0.0, 0.0], prompt=["q"] * 3)
    assert estimate(batch, AdvantageConfig("utterance", "mean", "std", ("prompt",), eps=0.0)).tolist() == [0.0] * 3


def test_the_order_of_steps_makes_no_difference_between_rollouts():
    """The same rewards in six orders: their means differ in the last bit, and the rollouts are equal."""
    orders = list(itertools.permutations((0.1, 0.2, 0.3)))
    batch = TurnBatch(
        reward=[value for order in orders for value in order], prompt=["q"] * 18,
        rollout=[n for n in range(6) for _ in range(3)], agent=["a"] * 18, turn=[0, 1, 2] * 6,
    )  # fmt: skip
    config = AdvantageConfig("utterance", "mean", "std", ("prompt",), unit="rollout", eps=0.0, post=("drop_zeros",))
    found = estimate_all(batch, config)
    assert found.advantages.tolist() == found.weights.tolist() == [0.0] * 18
    sums = {sum(order) for order in orders}
    assert len(sums) > 1, "rounding does differ"


def test_a_return_at_the_mean_is_left_out_and_the_others_stay():
    batch = TurnBatch(reward=[0.1, 0.2, -0.3, 0.0], prompt=["q"] * 4)
    found = estimate_all(batch, AdvantageConfig("utterance", "mean", "none", ("prompt",), post=("drop_zeros",)))
    assert found.weights.tolist() == [1, 1, 1, 0]
    assert float(torch.tensor([0.1, 0.2, -0.3, 0.0], dtype=torch.float64).mean()) != 0


def test_a_small_difference_that_is_real_still_counts():
    batch = TurnBatch(reward=[1.0, 1.0 + 1e-6], prompt=["q"] * 2)
    config = AdvantageConfig("utterance", "mean", "std", ("prompt",), eps=0.0)
    assert estimate(batch, config).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)


def test_groups_of_equals_are_counted_as_such():
    found = estimate_all(
        TurnBatch(reward=[ONE, OTHER, 0.0, 1.0], prompt=[0, 0, 1, 1]),
        AdvantageConfig("utterance", "mean", "std", ("prompt",)),
    )
    spreads = group_spreads(found, [[0, 1], [2, 3]], ["one"] * 4, "one")
    assert spreads["frac_reward_zero_std"] == 0.5
    said = [Utterance(0, "a", "a", 0, 0, [], "", rewards={"credit": credit}) for credit in (ONE, OTHER)]
    talks = [Dialogue(Example("e", "q", "a"), [u], prompt=7, rollout=n) for n, u in enumerate(said)]
    assert with_reward_variance(talks) == set(), "so that dynamic sampling replaces the question"
    said[0].rewards["credit"] = ONE + 0.5
    assert with_reward_variance(talks) == {7}


def test_rules_with_a_threshold_do_not_see_the_last_bit():
    assert Gate(("label", "brevity"), threshold=OTHER).gated([ONE, 5.0]) == ONE
    assert Gate(("label", "brevity"), threshold=0.29).gated([ONE, 5.0]) == ONE + 5.0
    assert 25 * 0.28 > 7 and Tier("near", zones=25, alpha=25).bonus(0.28) == 7
    assert PublicGoods(threshold=ONE).pay([1.0], OTHER) == PublicGoods(threshold=0.0).pay([1.0], OTHER)
    rule = Counterfactual(threshold=OTHER)
    assert [rule.turned(*pair) for pair in ((ONE, 0.0), (1.0, ONE), (0.0, ONE), (1.0, 0.0), (0.0, 1.0))] == [
        0,
        0,
        0,
        1,
        -1,
    ]


def test_agents_that_earn_the_same_have_won_nothing_from_each_other():
    rng = random.Random(0)
    (zero_sum,) = build_rules(["zero_sum"])
    for _ in range(100):
        value, count = a_value(rng), rng.randint(2, 9)
        said = [Utterance(n, f"a{n}", "a", 0, n, [], "") for n in range(count)]
        assert zero_sum([Dialogue(Example("e", "q", "a"), said)], [dict.fromkeys(range(count), value)]) == [
            dict.fromkeys(range(count), 0.0)
        ]
        worths = {frozenset(group): value for n in range(4) for group in itertools.combinations("abc", n)}
        assert shapley_values(worths) == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_a_tournament_of_equals_ends_alike_whatever_their_score_is():
    rng = random.Random(0)
    for players in range(2, 12):
        expected = eliminate(players, lambda a, b: (0.5, 0.5))
        for _ in range(20):
            value = a_value(rng)
            assert eliminate(players, lambda a, b, value=value: (value, value)) == expected


def test_dialogues_that_are_worth_the_same_make_no_pair():
    assert Gap().chosen([ONE, OTHER], "name") == []
    assert set(Gap().chosen([ONE, OTHER, 0.5], "name")) == {(2, 0), (2, 1)}


def test_equal_answers_are_read_once_by_a_verifier(monkeypatch):
    from served_verifiers import learner

    verifier = learner().learning.verifier
    asked = []
    monkeypatch.setattr(
        type(verifier),
        "score_batch",
        lambda self, batch: asked.extend(batch) or [1.0 / (len(asked) - i) for i in range(len(batch))],
    )
    found = verifier.score_ids([[1, 2], [3], [1, 2], [3, 4], [3]], batch_size=1)
    assert sorted(asked) == [[1, 2], [3], [3, 4]] and found[0] == found[2] and found[1] == found[4]
