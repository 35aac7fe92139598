"""Schedules: which agents and turns are trained in which updates."""

import pytest

from maporl.errors import ConfigError
from maporl.schedules import Freeze, Schedule, Span, one_turn_at_a_time
from maporl.validation.load import from_dict


def turns(schedule, *updates):
    return [None if (t := schedule.plan(u).turns) is None else sorted(t) for u in updates]


def test_the_originals_cycle_for_three_and_four_turns():
    # turns from 0: 20 updates on turn 1, then blocks of 40 from the last turn down to turn 1
    assert turns(one_turn_at_a_time(3), 1, 20, 21, 60, 61, 100, 101) == [[1], [1], [2], [2], [1], [1], [2]]
    assert turns(one_turn_at_a_time(4), 20, 21, 61, 101, 140, 141) == [[1], [3], [2], [1], [1], [3]]
    assert not one_turn_at_a_time(3).plan(1).learns("ann", 0)
    with pytest.raises(ValueError, match="needs at least 2 turns"):
        one_turn_at_a_time(1)


def test_any_cycle():
    schedule = Schedule(opening=[Span(2, [1, 2])], cycle=[Span(1, [2]), Span(2, [1])])
    assert turns(schedule, 1, 2, 3, 4, 5, 6, 7) == [[0, 1], [0, 1], [1], [0], [0], [1], [0]]


def test_an_agent_is_frozen_for_a_span_both_ends_included():
    schedule = Schedule(freeze=[Freeze("ann", 2, 3)])
    assert [schedule.plan(u).learns("ann", 0) for u in (1, 2, 3, 4)] == [True, False, False, True]
    assert schedule.plan(2).learns("bob", 0)
    never = Schedule(freeze=[Freeze("ann", 2)])
    assert [never.plan(u).learns("ann", 0) for u in (1, 2, 10**9)] == [True, False, False]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"opening": [{"updates": 0, "turns": [1]}]}, r"schedule\.opening\.0\.updates: expected at least 1, got 0"),
        ({"cycle": [{"updates": 1, "turns": [3]}]}, "turns from 1 to 2"),
        ({"freeze": [{"agent": "cy", "first": 1, "last": 2}]}, r"\['ann'\]"),
        ({"freeze": [{"agent": "ann", "first": 1, "last": 0}]}, "1 <= first <= last"),
        ({"preset": "one_turn_at_a_time", "cycle": [{"updates": 1, "turns": [1]}]}, "exclude each other"),
        ({"cycle": [{"updates": 1, "turn": [1]}]}, r"unknown key 'schedule\.cycle\.0\.turn'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_anything_loads(schedule, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(
            {"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}, "schedule": schedule}
        )
