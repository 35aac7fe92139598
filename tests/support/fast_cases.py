"""Parametrizations of which a few cases stand for all, so that the fast tests stay fast."""

from collections.abc import Iterable

import pytest


def some(cases: Iterable, *places: int) -> list:
    """The cases, of which all but those at these places are left to ``make test-slow``."""
    return [
        case
        if place in places
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
