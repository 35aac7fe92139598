"""Options of agents that call tools: their limits, and the texts of the plain call formats. Imports no torch."""

from typing import Literal

from pydantic.dataclasses import dataclass

from maporl.config.numbers import STRICT, AboveZero, Positive
from maporl.text import check_placeholders


@dataclass(frozen=True, config=STRICT)
class CallLimits:
    """The limits of an agent's calls.

    Args:
        calls: the most calls of a turn, failed ones included.
        failures: the number of failed calls in a row at which a turn has no calls left.
        seconds: the most seconds of a call.
        result_tokens: the most tokens of a result that the agent is shown.
        parallel: whether a completion may have several calls in the formats json and tags. If not, it ends right after its
            first call. If so, it ends with EOS.
        at_limit: what happens when no calls are left. The agent is told so and answers once more (``answer``), or its
            turn ends (``end``).
    """

    calls: Positive = 8
    failures: Positive = 3
    seconds: AboveZero = 30.0
    result_tokens: Positive = 512
    at_limit: Literal["answer", "end"] = "answer"
    parallel: bool = False


@dataclass(frozen=True, config=STRICT)
class CallTexts:
    """The texts of the formats ``json`` and ``tags``. Tiny models know few characters, so that all can be changed.

    Args:
        intro: stands before the lines of the tools, at the end of the system message.
        line: a tool, by its ``{signature}``: a line with its name, arguments and description, and a line for each argument that
            has a description.
        json: how a call is written, for the format ``json``.
        tags: how one is written, for ``tags``.
        returned: a result, by ``{name}`` and ``{text}``.
        failed: an error, by ``{name}`` and ``{text}``.
        limit: stands after the last result if no further call may be made.

    Raises:
        ValueError: a text has an unknown placeholder.
    """

    intro: str = "You can use these tools:"
    line: str = "{signature}"
    json: str = (
        'To use one, write <call>{{"name": NAME, "arguments": {{...}}}}</call> and stop. You will be told what it returns. '
        "When you know enough, answer without a call."
    )
    tags: str = (
        "To use one, write its name in tags, as <{name}>what you want</{name}>, and stop. You will be told what it returns. "
        "When you know enough, answer without a call."
    )
    returned: str = "{name} returned: {text}"
    failed: str = "{name} failed: {text}"
    limit: str = "You cannot call any more. Give your answer."

    def __post_init__(self):
        allowed = {"line": {"signature"}, "tags": {"name"}, "returned": {"name", "text"}, "failed": {"name", "text"}}
        for name in ("intro", "line", "json", "tags", "returned", "failed", "limit"):
            try:
                check_placeholders(getattr(self, name), allowed.get(name, set()))
            except ValueError as error:
                raise ValueError(
                    f"{name}: it may use {sorted(allowed.get(name, ()))} in braces, but has {error}"
                ) from None
