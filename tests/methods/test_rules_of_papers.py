"""The rules of one paper each, with its worked numbers."""

from itertools import product

import pytest
from scripted_dialogues import apply, dialogue

from maporl.methods.arenarl import eliminate


def test_the_tournament_of_arenarl_calls_its_judge_30_times_for_16_answers():
    calls = []
    eliminate(16, lambda a, b: calls.append((a, b)) or (1.0, 0.0))
    assert len(calls) == 30


@pytest.mark.parametrize(("near", "expected"), [(1.0, 1.5), (0.726, 1.375), (0.135, 1.125)])
def test_ssl_pays_by_zones(near, expected):
    played = dialogue(("a", 0, [], {"rewards": {"near": near}}))
    assert apply({"tier": {"proximity": "near"}}, [played], [{0: 1.0}]) == [{0: expected}]


@pytest.mark.parametrize(
    ("rule", "turn_0", "turn_1"),
    [
        ({"margin": {"of": "own"}}, [1, 1, 0], [1.0, -0.5, 1.5]),
        ({"quality": {"beta": 0.5}}, [1.5, 1.0, 0.5], [1.8333, -0.1667, 1.8333]),
    ],
)
def test_marti_shapes_later_turns_by_what_came_before(rule, turn_0, turn_1):
    debate = dialogue(*((a, t, [], {}) for t in range(2) for a in "xyz"))
    got = apply(rule, [debate], [dict(enumerate([1.0, 1, 0, 1, 0, 1]))])
    assert list(got[0].values()) == pytest.approx([*turn_0, *turn_1], abs=1e-4)


SCORES = {"aa": 0.5, "ab": 0.0, "ba": 0.0, "bb": 1.0}
NEAR = {"a": 0.9, "b": 0.1, "aa": 0.9, "ab": 0.9, "ba": 0.1, "bb": 0.3}
"""A game of two moves: its result, and a hint after each move, by the moves so far. The hint misleads."""


def returns_of_policies(rules, gamma):
    """The return of each policy (its first move, and its second one after a and after b), beside a partner whose moves
    have potentials of their own."""
    found = {}
    for first, after_a, after_b in product("ab", repeat=3):
        moves = first + {"a": after_a, "b": after_b}[first]
        said = [("x", 0, moves[:1]), ("y", 0, "b"), ("x", 1, moves), ("y", 1, "bb")]
        played = dialogue(*((agent, turn, [], {"rewards": {"near": NEAR[at]}}) for agent, turn, at in said))
        credits = {0: 0.0, 1: 0.0, 2: SCORES[moves], 3: SCORES[moves]}
        for rule in rules:
            (credits,) = apply(rule, [played], [credits])
        found[first + after_a + after_b] = round(credits[0] + gamma * credits[2], 6)
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_potential_changes_no_return_and_a_bonus_changes_what_is_best(gamma):
    plain = returns_of_policies([], gamma)
    b_then_b = {"bab": gamma, "bbb": gamma}
    assert plain == {"aaa": gamma / 2, "aab": gamma / 2, "aba": 0, "abb": 0, "baa": 0, "bba": 0} | b_then_b
    for weight in (1.0, -3.0):
        shaped = returns_of_policies([{"potential": {"of": "near", "gamma": gamma, "weight": weight}}], gamma)
        assert shaped == plain
    bonus = returns_of_policies([{"mix": {"weights": {"near": 1.0}}}], gamma)
    best = [policy for policy, value in bonus.items() if value == max(bonus.values())]
    # a, a: .9 + gamma (.5 + .9); b, b: .1 + gamma (1 + .3)
    assert best == ["aaa", "aab"] and (bonus["aaa"], bonus["bbb"]) == (0.9 + 1.4 * gamma, round(0.1 + 1.3 * gamma, 6))


def test_a_potential_with_another_discount_than_the_return_is_a_bonus():
    assert returns_of_policies([{"potential": {"of": "near", "gamma": 1.0}}], 0.5)["aaa"] == 0.25 + 0.9 * 0.5
