"""What every section of a configuration is made with: its decorator, and the numbers that an option may be. No torch.

Every class of options takes these from here, so that a bound has one name in the whole package.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from trl_ext.ppo.options import READ

T = TypeVar("T")

STRICT = ConfigDict(**READ)  # type: ignore[typeddict-item]  # trl_ext does not import pydantic
"""For a pydantic dataclass: an unknown key is an error, and editors are shown the help of each key."""


@dataclass_transform(frozen_default=True)
def section(*, frozen: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a section of a configuration: a dataclass whose values are checked, also if it is
    made in Python, and which has no keys but its own. :func:`trl_ext.ppo.options.option` declares its keys."""
    return dataclass(frozen=frozen, kw_only=kw_only, config=STRICT)  # type: ignore[return-value]  # it returns the class, as a protocol


Natural = Annotated[int, Field(ge=0)]
"""A whole number, 0 or more."""
Positive = Annotated[int, Field(ge=1)]
"""A whole number, 1 or more."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""Any number but infinity and NaN."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number, 0 or more."""
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0, such as a time in seconds or a learning rate."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A share from 0 to 1, both included."""
PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""A share above 0, up to all."""
