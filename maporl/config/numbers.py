"""What an option may be: numbers within bounds, and sections that have no keys but their own. No torch.

Every class of options takes these from here, so that a bound has one name in the whole package.
"""

import dataclasses
from typing import Annotated, Any

from pydantic import ConfigDict, Field


def _described(schema: dict[str, Any], kind: Any) -> None:
    """Put the help that stands beside each field into the JSON schema of its section."""
    for field in dataclasses.fields(kind):
        if told := field.metadata.get("help"):
            schema["properties"][field.name]["description"] = told


STRICT = ConfigDict(extra="forbid", json_schema_extra=_described)
"""For a pydantic dataclass: an unknown key is an error, and editors are shown the help of each key."""

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
