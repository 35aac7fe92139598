"""How much agents may call, and how long tools and environments may take. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CallLimits:
    """The limits of an agent's calls.

    Args:
        calls: the most calls of a turn, failed ones included.
        failures: the number of failed calls in a row at which a turn has no calls left.
        seconds: the most seconds of a call.
        result_tokens: the most tokens of a result that the agent is shown.
        at_limit: what happens when no calls are left. The agent is told so and answers once more (``answer``), or its
            turn ends (``end``).
    """

    calls: Count = 8
    failures: Count = 3
    seconds: Seconds = 30.0
    result_tokens: Count = 512
    at_limit: Literal["answer", "end"] = "answer"


@dataclass(frozen=True)
class EnvironmentLimits:
    """The limits of one environment.

    Args:
        calls: the most calls of a dialogue.
        seconds: the most seconds of a call.
        open_seconds: the most seconds of making and resetting it.
        close_seconds: the most seconds of closing it.
        at_once: how many instances are opened at once in a process.
    """

    calls: int = 64
    seconds: float = 30.0
    open_seconds: float = 60.0
    close_seconds: float = 10.0
    at_once: int = 64
