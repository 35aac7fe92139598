"""Options with a few values, of parts that are made in Python. In configurations, ``maporl.config`` checks them."""

import dataclasses
from typing import Literal, get_args, get_origin

import pytest

from maporl import Arithmetic
from maporl.advantages.transforms import TRANSFORMS
from maporl.protocols import PROTOCOLS
from maporl.rewards.rules import RULES
from maporl.schedules import Schedule
from maporl.tasks import TASKS

PARTS = {kind for kinds in (TASKS, PROTOCOLS, RULES, TRANSFORMS) for kind in kinds.values()} | {Schedule}
CHOICES = sorted(
    ((kind, field.name) for kind in PARTS for field in dataclasses.fields(kind) if get_origin(field.type) is Literal),
    key=str,
)


def test_the_message_names_the_choices_and_nothing_else_goes_wrong():
    with pytest.raises(ValueError, match=r"^Arithmetic: operation: expected 'sum' or 'times', got 'plus'$"):
        Arithmetic(operation="plus")
    with pytest.raises(ValueError, match=r"^Arithmetic: split: expected 'train' or 'eval', got 'test'$"):
        Arithmetic(split="test")  # it was the training split
    with pytest.raises(ValueError, match=r"operation: .*, got \['sum'\]$"):
        Arithmetic(operation=["sum"])
    for split in get_args(next(f.type for f in dataclasses.fields(Arithmetic) if f.name == "split")):
        assert len(Arithmetic(split=split)) > 0


@pytest.mark.parametrize(("kind", "name"), CHOICES, ids=[f"{kind.__name__}.{name}" for kind, name in CHOICES])
def test_a_choice_that_does_not_exist_is_refused(kind, name):
    given = {f.name: "x" for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name}: expected '?\w+'? or .*, got 'another'$"):
        kind(**given | {name: "another"})


def test_every_kind_of_part_has_choices():
    assert len(CHOICES) > 20
