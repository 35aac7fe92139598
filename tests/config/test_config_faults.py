"""What was expected of a value, by the type of pydantic's fault, in the words of this package."""

import dataclasses
import enum
import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from maporl.config.faults import SHORT, _keys, _places
from maporl.config.parse import parse_config, validated
from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.protocols import build_protocol
from maporl.sections import Finite, Natural, section

Size = enum.Enum("Size", {"SMALL": "small", "LARGE": "large"})


@section()
class One:
    value: Any


@pytest.mark.parametrize(("hint", "value", "message"), [
    (dict[str, int], 3, "expected a mapping of keys to values, got 3"),
    (One, "three", "expected a mapping of keys to values, got 'three'"),
    (list[int], "three", "expected a list, as [three], got 'three'"),
    (tuple[int, ...], "two words", "expected a list, as [a, b], got 'two words'"),
    (set[int], 3, "expected a list, as [a, b], got 3"),
    (str, [3], "expected a text, got [3]"),
    (int, "three", "expected a whole number, got 'three'"),
    (int, 3.5, "expected a whole number, got 3.5"),
    (int, None, "expected a whole number, got None"),
    (float, "three", "expected a number, got 'three'"),
    (bool, "perhaps", "expected true or false, got 'perhaps'"),
    (Finite, float("nan"), "expected a finite number, got nan"),
    (Natural, -1, "expected at least 0, got -1"),
    (Annotated[float, Field(ge=0.5)], 0.25, "expected at least 0.5, got 0.25"),
    (Annotated[float, Field(gt=0)], 0.0, "expected more than 0, got 0.0"),
    (Annotated[float, Field(le=1)], 1.5, "expected at most 1, got 1.5"),
    (Annotated[int, Field(lt=2**32)], 2**32, "expected less than 4294967296, got 4294967296"),
    (Literal["a", "b", 3], "c", "expected 'a', 'b' or 3, got 'c'"),
    (Size, "middle", "expected 'small' or 'large', got 'middle'"),
    (Annotated[dict[str, int], Field(min_length=1)], {}, "expected at least one, got {}"),
    (Annotated[list[int], Field(min_length=1)], [], "expected at least one, got []"),
], ids=str)  # fmt: skip
def test_a_fault_says_what_was_expected(hint, value, message):
    kind = section()(type("Section", (), {"__annotations__": {"key": hint}}))
    with pytest.raises(ConfigError) as raised:
        validated(kind, {"key": value}, "run.yaml")
    assert str(raised.value) == f"run.yaml: key: {message}"


def targets(place):
    """The dataclass and the field that a place of a key names, below a configuration."""
    kind = Config
    *sections, key = place.replace("NAME.", "").split(".")
    for name in sections:
        kind = _keys(kind, ("agents", "ann") if name == "agents" else (name,))[1]
    return {field.name for field in dataclasses.fields(kind)}, key


def test_short_words_lead_to_keys_that_exist_and_are_none_themselves():
    for word, places in SHORT.items():
        assert word not in _places()
        for place in places:
            names, key = targets(place)
            assert key in names, place


@pytest.mark.parametrize(("values", "message"), [
    ({"lr": 1e-4}, "unknown key 'lr'; did you mean 'training.learning_rate'?"),
    ({"training": {"lr": 1e-4}}, "unknown key 'training.lr'; did you mean 'learning_rate'?"),
    ({"agents": {"ann": {"lora": {"rank": 8}}}}, "unknown key 'agents.ann.lora.rank'; did you mean 'r'?"),
    ({"rank": 8}, "unknown key 'rank'; did you mean 'agents.NAME.lora.r'?"),
])  # fmt: skip
def test_words_of_other_programs_get_the_key_that_is_meant(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(values, "run.yaml")


def test_a_slip_in_an_option_of_a_part_gets_its_nearest():
    with pytest.raises(ConfigError, match=r"unknown key 'anwser'; did you mean 'answer'\?"):
        build_protocol({"name": "orchestrate", "anwser": "Answer."}, ("ann", "bob", "eve"), "run.yaml")
