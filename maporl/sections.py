"""What every section of a configuration is made with: its decorator, and the numbers that a key may be. No torch."""

from collections.abc import Callable
from typing import TypeVar, dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from trl_ext.ppo.options import READ
from trl_ext.ppo.options import AboveZero as AboveZero
from trl_ext.ppo.options import Finite as Finite
from trl_ext.ppo.options import Natural as Natural
from trl_ext.ppo.options import NotNegative as NotNegative
from trl_ext.ppo.options import Positive as Positive
from trl_ext.ppo.options import PositiveShare as PositiveShare
from trl_ext.ppo.options import ProperShare as ProperShare
from trl_ext.ppo.options import Share as Share

T = TypeVar("T")

STRICT = ConfigDict(**READ)  # type: ignore[typeddict-item]  # trl_ext does not import pydantic
"""For a pydantic dataclass: an unknown key is an error, and editors are shown the help of each key."""


@dataclass_transform(frozen_default=True)
def section(*, frozen: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a section of a configuration: a dataclass whose values are checked, also if it is
    made in Python, and which has no keys but its own. :func:`trl_ext.ppo.options.option` declares its keys."""
    return dataclass(frozen=frozen, kw_only=kw_only, config=STRICT)  # type: ignore[return-value]  # it returns the class, as a protocol
