"""How a snippet ended, and how the answers of its process are read. Nothing that such a process writes is trusted."""

import builtins
import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from maporl.sandbox.sandboxed.values import SAID_BYTES, NotPlain, cut, plain_value

REASONS = ("ok", "source", "syntax", "no_value", "timeout", "cpu", "memory", "output", "killed")
"""How a snippet may end; ``error:NAME`` with the name of a built-in exception is one more way.

``source``: the code is not a text, or it is blank or too long. ``no_value``: the code has no such function, or the
function returned None, a number that is not finite, or something that JSON cannot hold. ``output``: it printed or
returned too much. ``killed``: it died in another way, or its process wrote no verdict.
"""


@dataclass(frozen=True)
class Outcome:
    """How a snippet ended: ``reason`` is one of ``REASONS``, and ``value`` what it returned, None unless it is "ok".

    ``printed`` is what it printed, and ``message`` the last line of its error, such as ``ValueError: too short``. Both
    are at most 4,096 bytes, and the snippet may have written anything there. Outcomes are equal if value and reason
    are.
    """

    value: Any
    reason: str
    printed: str = field(default="", compare=False, repr=False)
    message: str = field(default="", compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the snippet ran to its end."""
        return self.reason == "ok"


@dataclass(frozen=True)
class Ended:
    """The raw result of a snippet: its verdict and its output, as bytes, and how its processes ended.

    ``statuses`` are those of ``waitpid``. ``in_time`` says whether the verdict was complete before the time was up, and
    ``flooded`` whether more came than may. ``heard``: the seconds after the beginning at which parts of the verdict
    came, each with the bytes of the verdict up to there. ``seconds``: how long it all took.
    """

    verdict: bytes
    printed: bytes
    statuses: tuple[int, ...]
    in_time: bool
    flooded: bool
    heard: tuple[tuple[float, int], ...] = ()
    seconds: float = 0.0

    def outcome(self) -> Outcome:
        """The outcome of one snippet."""
        printed = cut(self.printed[: 4 * SAID_BYTES].decode("utf-8", "replace"))
        reason = self._reason(0)
        if reason is None:
            verdict = decode(self.verdict.removesuffix(b"\n"))
            return Outcome(verdict.value, verdict.reason, printed, verdict.message)
        return Outcome(None, reason, printed)

    def outcomes(self, most: int) -> list[Outcome]:
        """The outcomes of tests, from a line for each. If not all of them were told, the last one says why.

        More than ``most`` lines count as one "killed".
        """
        lines = self.verdict.split(b"\n")[:-1]  # what stands after the last end of a line was not told whole
        if len(lines) > most:
            return [Outcome(None, "killed")]
        lost = bool(lines) and _reason_of(lines[-1]) == "lost"  # the program's process ended before its tests
        outcomes = [decode(line) for line in lines[: len(lines) - lost]]
        # the process of the tests ends in good order, with fewer lines, after a verdict that ends all of them; where
        # that is "ok", the next test ended the process
        if lost or not outcomes or (len(outcomes) < most and (self._reason(1) or outcomes[-1].ok)):
            outcomes.append(Outcome(None, self._reason(0 if lost else 1) or "killed"))
        return outcomes

    def mostly_after(self, lines: int) -> bool:
        """Whether more than half of the time passed after the first ``lines`` lines of the verdict were there."""
        size = sum(len(line) + 1 for line in self.verdict.split(b"\n")[:lines])
        began = next((seconds for seconds, come in self.heard if come >= size), 0.0)
        return self.seconds - began > self.seconds / 2

    def _reason(self, process: int) -> str | None:
        """Why a process has no verdict of its own, or None if it ended in good order."""
        status = self.statuses[process]
        if not self.in_time:
            return "timeout"
        if self.flooded:
            return "output"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return "cpu"
        return None if status == 0 else "killed"


def decode(payload: bytes) -> Outcome:
    """The outcome in a verdict.

    A malformed one counts as "killed": what the snippet's process runs of ours writes none.
    """
    record = _loaded(payload)
    if isinstance(record, dict) and record.keys() == {"value", "reason", "message"}:
        record["printed"] = ""
        return plain_outcome(record) or Outcome(None, "killed")
    return Outcome(None, "killed")


def plain_outcome(record: Any) -> Outcome | None:
    """The outcome that a record holds, or None if no snippet ends so."""
    if not isinstance(record, dict) or record.keys() != {"value", "reason", "printed", "message"}:
        return None
    said = record["printed"], record["message"]
    if not _is_reason(record["reason"]) or not all(isinstance(text, str) and text == cut(text) for text in said):
        return None
    try:
        return Outcome(plain_value(record["value"]) if record["reason"] == "ok" else None, record["reason"], *said)
    except (NotPlain, RecursionError):
        return None


def _loaded(payload: bytes) -> Any:
    try:
        return json.loads(payload.decode())  # UTF-8 only: from bytes, json would guess another encoding
    except (ValueError, RecursionError):
        return None


def _reason_of(line: bytes) -> Any:
    record = _loaded(line)
    return record.get("reason") if isinstance(record, dict) else None


def _is_reason(reason: Any) -> bool:
    if not isinstance(reason, str):
        return False
    kind, _, name = reason.partition(":")
    error = getattr(builtins, name, None)
    return reason in REASONS or (kind == "error" and isinstance(error, type) and issubclass(error, BaseException))
