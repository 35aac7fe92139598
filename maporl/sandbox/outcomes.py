"""How a snippet ended, and how the worker's answers are read. Nothing that the worker writes is trusted."""

import builtins
import json
from dataclasses import dataclass, field
from typing import Any

from maporl.sandbox.sandboxed.values import NotPlain, cut, plain_value

REASONS = ("ok", "source", "syntax", "forbidden", "no_value", "timeout", "cpu", "memory", "output", "killed")
"""How a snippet may end; ``error:NAME`` with the name of a built-in exception is one more way.

``source``: the code is not a text, or it is blank or too long. ``no_value``: the code has no such function, or the
function returned None, a number that is not finite, or something that JSON cannot hold. ``output``: it printed or
returned too much. ``killed``: it died in another way.
"""


@dataclass(frozen=True)
class Outcome:
    """How a snippet ended: ``reason`` is one of ``REASONS``, and ``value`` what it returned, None unless it is "ok".

    ``printed`` is what it printed, and ``message`` the last line of its error, such as ``ValueError: too short``. Both are
    at most 4,096 bytes, and the snippet may have written anything there. Outcomes are equal if value and reason are.
    """

    value: Any
    reason: str
    printed: str = field(default="", compare=False, repr=False)
    message: str = field(default="", compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the snippet ran to its end."""
        return self.reason == "ok"


def decode(payload: bytes) -> Outcome:
    """The outcome in the worker's answer. A malformed answer counts as "killed": the worker's own code writes none."""
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        record = None
    return plain_outcome(record) or Outcome(None, "killed")


def decode_lines(payload: bytes, most: int) -> list[Outcome]:
    """The outcomes in an answer with a line for each, at least one. More than ``most`` lines count as one "killed"."""
    lines = payload.split(b"\n")
    return [decode(line) for line in lines] if len(lines) <= most else [Outcome(None, "killed")]


def plain_outcome(record: Any) -> Outcome | None:
    """The outcome that a record of the worker holds, or None if no worker writes such a record."""
    if not isinstance(record, dict) or record.keys() != {"value", "reason", "printed", "message"}:
        return None
    said = record["printed"], record["message"]
    if not _is_reason(record["reason"]) or not all(isinstance(text, str) and text == cut(text) for text in said):
        return None
    try:
        return Outcome(plain_value(record["value"]) if record["reason"] == "ok" else None, record["reason"], *said)
    except (NotPlain, RecursionError):
        return None


def _is_reason(reason: Any) -> bool:
    if not isinstance(reason, str):
        return False
    kind, _, name = reason.partition(":")
    error = getattr(builtins, name, None)
    return reason in REASONS or (kind == "error" and isinstance(error, type) and issubclass(error, BaseException))
