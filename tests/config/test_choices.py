"""Options with a few values or with bounds, of parts that are made in Python. In configurations, ``maporl.config``
checks them by the same types."""

import dataclasses
import math
import re
from typing import Literal, get_origin

import pytest

from maporl import Arithmetic
from maporl.advantages.transforms import TRANSFORMS
from maporl.config import validated
from maporl.errors import ConfigError
from maporl.methods.games.kuhn import KuhnPoker
from maporl.protocols import PROTOCOLS
from maporl.rewards.rules import RULES
from maporl.schedules import OpponentPool, Schedule, Span
from maporl.tasks import TASKS
from trl_ext.ppo.options import LearnerOptions, Positive, PPOOptions, must_be_different, option, options

PARTS = {kind for kinds in (TASKS, PROTOCOLS, RULES, TRANSFORMS) for kind in kinds.values()} | {Schedule}
CHOICES = sorted(
    ((kind, field.name) for kind in PARTS for field in dataclasses.fields(kind) if get_origin(field.type) is Literal),
    key=str,
)


def test_what_is_no_text_is_no_choice_and_every_kind_of_part_has_choices():
    with pytest.raises(ValueError, match=r"^Arithmetic: operation: expected 'sum' or 'times', got \['sum'\]$"):
        Arithmetic(operation=["sum"])
    assert len(CHOICES) > 20


@pytest.mark.parametrize(("kind", "name"), CHOICES, ids=[f"{kind.__name__}.{name}" for kind, name in CHOICES])
def test_a_choice_that_does_not_exist_is_refused(kind, name):
    given = {f.name: "x" for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name}: expected '?\w+'? or .*, got 'another'$"):
        kind(**given | {name: "another"})


@pytest.mark.parametrize(("kind", "given", "expected", "read"), [
    (Arithmetic, {"held_out": 1.0}, "held_out: expected a number above 0 and below 1, got 1.0", "less than 1, got 1.0"),
    (Arithmetic, {"held_out": math.nan}, "held_out: expected a number above 0 and below 1, got nan", "less than 1, got nan"),
    (Span, {"updates": 0, "turns": [1]}, "updates: expected a whole number of at least 1, got 0", "at least 1, got 0"),
    (Schedule, {"critic_warmup": "one"}, "critic_warmup: expected a whole number of at least 0, got 'one'", "a whole number, got 'one'"),
    (OpponentPool, {"agent": "a", "of": "b", "probability": 2}, "probability: expected a number of at least 0 and at most 1, got 2", "at most 1, got 2"),
    (KuhnPoker, {"rounds": None}, "rounds: expected a whole number of at least 1, got None", "a whole number, got None"),
    (PPOOptions, {"lam_alpha": 0}, "lam_alpha: expected a number above 0, got 0", "more than 0, got 0"),
    (PPOOptions, {"gamma": math.inf}, "gamma: expected a number of at least 0, got inf", "a finite number, got inf"),
    (LearnerOptions, {"learning_rate": -1}, "learning_rate: expected a number of at least 0, got -1", "at least 0, got -1"),
])  # fmt: skip
def test_a_bound_is_kept_in_python_and_in_files(kind, given, expected, read):
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        kind(**given)
    with pytest.raises(ConfigError, match=rf"^file: \w+: expected {re.escape(read)}$"):
        validated(kind, given, "file")


@pytest.mark.parametrize(("given", "message"), [
    ({"perhaps": 0}, "perhaps: expected a whole number of at least 1, got 0"),
    ({"perhaps": 1.5}, "perhaps: expected a whole number of at least 1, got 1.5; None does without"),
    ({"perhaps": True}, "perhaps: expected a whole number of at least 1, got True"),
    ({"each": (1, 0)}, "each: expected a whole number of at least 1, or a list of them, got (1, 0)"),
    ({"skill": ("a", "a")}, "skill: expected each once and at least one, got ('a', 'a')"),
    ({"skill": None}, "skill: expected each once and at least one, got None"),
])  # fmt: skip
def test_a_bound_is_kept_by_each_entry_and_none_is_allowed_where_the_type_says_so(given, message):
    @options()
    class Own:
        each: tuple[Positive, ...] = ()
        perhaps: Positive | None = option(None, remedy="None does without")
        one_or_more: Positive | list[float] = 0
        skill: tuple[str, ...] = option(("a",), must=must_be_different)

    assert Own() == Own(each=(), perhaps=None, one_or_more=0, skill=("a",))
    with pytest.raises(ValueError, match=re.escape(message)):
        Own(**given)
