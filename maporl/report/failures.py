"""Where a team still fails: sentences that count its last dialogues, each with the dialogues it counts, and tables."""

from collections.abc import Callable
from typing import Any

from maporl.evaluation.metrics import Share
from maporl.report.counts import counts_of
from maporl.report.dialogues import kind_of, last_answers, right_share
from maporl.report.findings import findings, said
from maporl.report.read import Recorded, Run
from maporl.text import visible
from maporl.types import Dialogue

MOST_PARTS = 12
"""A table has at most so many rows."""
PROPERTIES: tuple[tuple[str, str, Callable[[Dialogue], str | None]], ...] = (
    ("Kind", "kind", kind_of),
    ("Length of the right answer", "characters", lambda dialogue: str(len(dialogue.example.answer))),
)
"""By what questions are told apart: the title of a table, its first column, and a question's row in it."""


def failures(run: Run) -> dict[str, Any]:
    """Failures on the held-out questions after training, or else in the dialogues of the last updates.

    ``scope`` says what was counted. ``lines`` are sentences, each with the ``keys`` of the dialogues that it counts.
    ``groups`` are tables of accuracy by a property of the question.
    """
    c = counts_of(run)
    lines = findings("fails", c.failed)
    return {
        "scope": said("scope", c),
        "lines": [{"text": text, "keys": [visible(one.key) for one in case.dialogues]} for text, case in lines],
        "groups": [] if c.game else _groups(c.ended, run.of("before") if run.of("after") else []),
    }


def _groups(played: list[Recorded], before: list[Recorded]) -> list[dict[str, Any]]:
    """Accuracy at the end by the properties of a question."""
    earlier, tables = _right(before), []
    for title, column, of in PROPERTIES:
        parts: dict[str, list[Recorded]] = {}
        for one in played:
            if (value := of(one.dialogue)) is not None:
                parts.setdefault(value, []).append(one)
        if 2 <= len(parts) <= MOST_PARTS:
            rows = [
                _row(name, _right(parts[name]), earlier) for name in sorted(parts, key=lambda name: (len(name), name))
            ]
            tables.append({"title": title, "column": column, "rows": rows})
    return tables


def _row(name: str, right: dict[str, float], earlier: dict[str, float]) -> dict[str, Any]:
    now, before = Share(sum(right.values()), len(right)), [earlier[id] for id in right if id in earlier]
    low, high = now.interval()
    was = sum(before) / len(before) if before else None
    return {"name": name, "questions": now.total, "now": now.value, "low": low, "high": high, "before": was}


def _right(played: list[Recorded]) -> dict[str, float]:
    """The share of last answers that are right of each question: dialogues on one question are not independent."""
    by_question: dict[str, list[float]] = {}
    for one in played:
        if last_answers(one.dialogue):
            by_question.setdefault(one.dialogue.example.id, []).append(right_share(one.dialogue))
    return {name: sum(shares) / len(shares) for name, shares in by_question.items()}
