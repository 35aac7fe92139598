"""Copies for a user's code, such as reward functions, so that its edits change nothing else. Imports no torch."""

import copy
from dataclasses import fields, is_dataclass
from typing import Any

PLAIN = {int, float, str, bool, bytes, type(None)}
"""The types of values that nobody can edit."""


def own_copy(value: Any) -> Any:
    """Return a copy of lists, tuples, dictionaries, tensors and dataclasses, and of all in them. What else is in them
    is the same object, such as an environment."""
    if isinstance(value, list | tuple) and {*map(type, value)} <= PLAIN:
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(own_copy, value))
    if type(value) is dict:
        return {key: own_copy(inner) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in fields(value):
            object.__setattr__(new, field.name, own_copy(getattr(value, field.name)))
        return new
    return value.clone() if hasattr(value, "clone") and hasattr(value, "shape") else value


def is_users(code: Any, *ours: str) -> bool:
    """Return whether a function or an object is code of the user's: of none of ``ours``, the packages of this one."""
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] not in ours
