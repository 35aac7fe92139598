"""Say in one line what a value of a configuration should have been: pydantic's faults, by their types, in the words of
this package. No torch."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

from maporl.config.algorithm import NOT_LEARNED, Algorithm
from maporl.config.imports import is_import
from maporl.config.schema import AgentSection, Config
from maporl.credentials import without_secrets
from trl_ext.ppo.options import remedy_of

_LISTS = ("list_type", "tuple_type", "set_type", "frozen_set_type")
"""Faults of a single value where a list is expected. Its members may well be parts of the user's own."""

_EXPECTED = {
    **dict.fromkeys(
        ("dict_type", "mapping_type", "dataclass_type", "model_attributes_type"), "a mapping of keys to values"
    ),
    **dict.fromkeys(_LISTS, "a list, as [a, b]"),
    "string_type": "a text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""What was expected, by the type of pydantic's fault and what the fault says of itself.

All other faults keep pydantic's words.
"""

_BY_NAME = ("task", "protocol")
"""The sections that are chosen by name, so that people write the name alone."""


OF_TRL = {
    "num_generations": "branching.group",
    "max_completion_length": "ppo.response_length",
    "max_new_tokens": "ppo.response_length",
    "beta": "ppo.kl_coef",
    "epsilon": "ppo.cliprange",
    "epsilon_high": "ppo.cliprange_high",
    "num_iterations": "ppo.num_ppo_epochs",
    "scale_rewards": "advantage.scale",
    "loss_type": "ppo.aggregation",
    "importance_sampling_level": "ppo.ratio",
    "reward_weights": "reward.sources",
    "use_vllm": "agents.NAME.engine",
    "max_steps": "updates",
    "num_train_epochs": "updates",
    "model_name_or_path": "agents.NAME.model",
}
"""Options of TRL's trainers, and the keys that have their meaning here."""
SHORT = {
    "lr": ("training.learning_rate",),
    "rank": ("agents.NAME.lora.r",),
    "lora_r": ("agents.NAME.lora.r",),
    "lora_rank": ("agents.NAME.lora.r",),
    "lora_alpha": ("agents.NAME.lora.alpha",),
}
"""Words that people use for keys, and the keys: no distance between letters leads from one to the other."""

_TYPES = ("bool", "int", "constrained-int", "float", "constrained-float", "str")
"""What pydantic adds to the place of a value that may be of several types. No key of a configuration is called so."""


def explain(kind: type, faults: Sequence[Any]) -> list[str]:
    """Return a line for each of pydantic's ``faults`` in values for the dataclass ``kind``, without repetitions.

    Where a value may be of several types, pydantic has a fault for each. Those of a text, and of a number in place of a
    list that was given, are left out.
    """
    told = [fault for fault in faults if not _has_better(fault, faults)]
    return list(dict.fromkeys(_explain(kind, fault) for fault in told))


def _has_better(fault: Any, faults: Sequence[Any]) -> bool:
    place = fault["loc"][:-1]
    others = (other for other in faults if other is not fault and other["loc"][: len(place)] == place)
    text = fault["type"] == "string_type" and fault["loc"][-1] == "str"
    numbers = ("int", "constrained-int", "float", "constrained-float")
    number = isinstance(fault["input"], list | tuple) and fault["loc"][-1] in numbers
    several = isinstance(fault["input"], int | float) and fault["type"] == "list_type"
    return ((text or number) and any(others)) or (several and any(other["loc"][-1] in numbers for other in others))


def _explain(kind: type, fault: Any) -> str:
    whole = fault["loc"]
    # list[str] is the name of a type
    places = [part for part in _keys(kind, whole)[0] if "[" not in str(part)]
    if len(places) > 1 and places[-1] in _TYPES:
        places.pop()
    location = ".".join(f"{part!s:.80}" for part in places)
    value = without_secrets(fault["input"], str(places[-1]) if places else "", deepest=5)
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"unknown key {location!r}; {_nearest(kind, fault['loc'])}"
    if fault["type"] in ("missing", "missing_argument"):
        return f"{location}: this key is required"
    if fault["type"] == "union_tag_not_found":
        return f"{location}.{_tag(fault)}: this key is required"
    if fault["type"] == "union_tag_invalid":
        tags, _, last = fault["ctx"]["expected_tags"].rpartition(", ")
        return f"{location}.{_tag(fault)}: expected {tags} or {last}, got {value[_tag(fault)]!r:.80}"
    if fault["type"] == "string_type" and isinstance(value, bool | int | float | dict):
        return (
            f"{location}: expected a text, got {value!r:.80}; put a text that YAML would read as something else in "
            "quotes: "
            f'{places[-1]}: "TEXT" in a file, \'{places[-1]}="TEXT"\' on a command line'
        )
    note = "; no part of your own can be named here" if is_import(value) and fault["type"] not in _LISTS else ""
    if fault["type"] == "value_error":  # a message of a dataclass here, which may begin with a key
        message = str(fault["ctx"]["error"])
        return f"{location}{'.' if re.match(r'[a-z_]+: ', message) else ': '}{message}{note}" if location else message
    keys, section = _keys(kind, whole)
    declared = dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    told = [remedy_of(f) for f in declared if f.name in keys[-1:]]
    return "; ".join([f"{location}: {_expected(fault, location)}, got {value!r:.80}{note}", *filter(None, told)])


def _tag(fault: Any) -> str:
    """Return the key that says which section of several a mapping is."""
    return fault["ctx"]["discriminator"].strip("'")


def _expected(fault: Any, location: str) -> str:
    """Return a text with what was expected at ``location``, or pydantic's own where it knows better."""
    told, value = fault.get("ctx", {}), fault["input"]
    if fault["type"] == "too_short" and told["min_length"] == 1:
        return "expected at least one"
    if fault["type"] not in _EXPECTED:
        return fault["msg"]
    # bounds of floats are floats, such as 0.0
    told = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound for name, bound in told.items()
    }
    message = "expected " + _EXPECTED[fault["type"]].format(**told)
    if isinstance(value, str) and value.isidentifier():
        message = message.replace("[a, b]", f"[{value}]")
        if fault["type"] == "dict_type" and location in _BY_NAME:
            message += f", as {{name: {value}}}"
    return message


def _nearest(kind: type, location: tuple) -> str:
    """Return a text with the known keys at ``location`` and the key that is nearest to its last part."""
    without = NOT_LEARNED if "algorithm" in location[:-1] else ()
    return nearest_key(_keys(kind, location[:-1])[1], str(location[-1]), without)


def nearest_key(section: Any, key: str, without: Collection[str] = ()) -> str:
    """Return a text with the keys of the dataclass ``section`` but those ``without``, and where a key like ``key``
    stands, there or elsewhere."""
    declared = dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    names = [f.name for f in declared if f.name not in without]
    if section is AgentSection and key in {f.name for f in dataclasses.fields(Algorithm)}.difference(names):
        return f"did you mean 'algorithm.{key}'? known: {', '.join(names)}"
    if key in OF_TRL:
        return f"TRL's {key} is {OF_TRL[key]!r} here; known: {', '.join(names)}"
    elsewhere = _places()
    if key in SHORT and key not in elsewhere:
        # the last part alone where the key stands in its section already
        meant = [place.rpartition(".")[2] if place.rpartition(".")[2] in names else place for place in SHORT[key]]
        return f"did you mean {' or '.join(map(repr, meant))}? known: {', '.join(names)}"
    near = difflib.get_close_matches(key[:80], names, 1) if key not in elsewhere else []
    near = near or [
        place for name in difflib.get_close_matches(key[:80], elsewhere, 1, 0.85) for place in elsewhere[name]
    ]
    hint = f"did you mean {' or '.join(map(repr, near[:3]))}? " if near else ""
    below = (
        "; what a protocol or a task can be told stands below protocol: or task:"
        if section is Config and not near
        else ""
    )
    return f"{hint}known: {', '.join(names)}{below}"


def _keys(kind: type, location: Sequence[Any]) -> tuple[list[Any], type]:
    """Return the keys of a location below the dataclass ``kind``, and the section in which the last one stands.

    Where a value may be one of several sections, pydantic adds the tag of the one that it read, such as ``sft``.
    """
    keys, inside = [], _dataclasses_in(kind)
    for part in location:
        hints = {f.name: f.type for one in inside for f in dataclasses.fields(one)}
        if part not in hints and (tagged := [one for one in inside if part in _tags(one)]):
            inside = tagged
            continue
        keys.append(part)
        inside = _dataclasses_in(hints.get(part)) or inside
    return keys, inside[0] if inside else kind


def _tags(kind: type) -> set[Any]:
    """Return the values of those keys of a section that allow one value alone."""
    hints = [f.type for f in dataclasses.fields(kind) if get_origin(f.type) is Literal]
    return {value for hint in hints for value in get_args(hint) if len(get_args(hint)) == 1}


@cache
def _places() -> dict[str, list[str]]:
    """Return the places of every key of an override, as in ``{"optim": ["training.optim"]}``, the nearest first."""
    by_key: dict[str, list[str]] = {}
    left: list[tuple[str, Any]] = [("", Config)]
    while left:
        prefix, kind = left.pop(0)
        for f in dataclasses.fields(kind):
            by_key.setdefault(f.name, []).append(f"{prefix}{f.name}")
            # an algorithm has keys of other sections
            alone = getattr(f.type, "__origin__", None) is not list and f.type is not Algorithm
            if alone and (inner := _dataclasses_in(f.type)):
                left.append((f"{prefix}{f.name}.{'NAME.' if f.name == 'agents' else ''}", inner[0]))
    return {name: sorted(places, key=lambda place: place.count(".")) for name, places in by_key.items()}


def _dataclasses_in(hint: Any) -> list[type]:
    """Return the sections that a value of the type ``hint`` may be, or may hold."""
    if (kind := getattr(hint, "__options_of__", None)) is not None:  # a mapping with some options of a section
        return [kind]
    if dataclasses.is_dataclass(hint):
        return [hint]  # type: ignore[list-item]
    return [inner for part in getattr(hint, "__args__", ()) for inner in _dataclasses_in(part)]
