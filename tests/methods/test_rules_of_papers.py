"""The rules of one paper each, with its worked numbers."""

import pytest
from written_dialogues import apply, dialogue

from maporl.methods.arenarl import eliminate


@pytest.mark.parametrize(("outcome", "expected"), [(-0.5, -0.5), (0.0, 0.0), (1.0, 1.15)])
def test_g_ra_counts_steps_only_above_a_good_outcome(outcome, expected):
    played = dialogue(("a", 0, [], {"rewards": {"outcome": outcome, "steps": 0.15}}))
    assert apply({"gate": {"order": ["outcome", "steps"]}}, [played], [{0: 9.0}]) == [{0: expected}]


@pytest.mark.parametrize(("near", "expected"), [(1.0, 1.5), (0.726, 1.375), (0.135, 1.125)])
def test_ssl_pays_by_zones(near, expected):
    played = dialogue(("a", 0, [], {"rewards": {"near": near}}))
    assert apply({"tier": {"proximity": "near"}}, [played], [{0: 1.0}]) == [{0: expected}]


def test_a_public_good_pays_later_speakers_more():
    goods = dialogue(("a", 0, [], {}), ("b", 0, [], {}), ("c", 0, [], {}))
    got = apply("public_goods", [goods], [{0: 0.6, 1: 0.7, 2: 0.8}])
    assert list(got[0].values()) == pytest.approx([0.444, 0.641, 0.936], abs=1e-3)


def test_arena_ranks_by_tournament():
    """ArenaRL: true qualities 5, 8, 6, 3 without noise; 30 calls for 16 answers."""
    answers = [dialogue(("a", 0, [], {}), rollout=r) for r in range(4)]
    got = apply("tournament", answers, [{0: 5.0}, {0: 8.0}, {0: 6.0}, {0: 3.0}])
    assert [own[0] for own in got] == pytest.approx([1 / 3, 1, 2 / 3, 0])
    calls = []
    eliminate(16, lambda a, b: calls.append((a, b)) or (1.0, 0.0))
    assert len(calls) == 30


def test_spa_redistributes_by_progress_and_grounding():
    steps = dialogue(*(("a", t, [], {"rewards": {"progress": c, "ground": g}}) for t, (c, g) in enumerate(zip((0.1, 0.25, 0.05, 0.4), (1, 1, 0, 1), strict=True))))  # fmt: skip
    got = apply({"redistribute": {"by": "progress", "grounding": "ground"}}, [steps], [{}])
    assert list(got[0].values()) == pytest.approx([0.6, 0.75, 0.05, 0.9])


@pytest.mark.parametrize(
    ("rule", "turn_0", "turn_1"),
    [
        ("quality", [1, 1, 0], [1.3333, -0.1667, 1.3333]),
        ("margin", [1, 1, 0], [1.1667, -0.3333, 1.1667]),
        ({"margin": {"of": "own"}}, [1, 1, 0], [1.0, -0.5, 1.5]),
        ({"quality": {"beta": 0.5}}, [1.5, 1.0, 0.5], [1.8333, -0.1667, 1.8333]),
    ],
)
def test_marti_shapes_later_turns_by_what_came_before(rule, turn_0, turn_1):
    debate = dialogue(*((a, t, [], {}) for t in range(2) for a in "xyz"))
    got = apply(rule, [debate], [dict(enumerate([1.0, 1, 0, 1, 0, 1]))])
    assert list(got[0].values()) == pytest.approx([*turn_0, *turn_1], abs=1e-4)
