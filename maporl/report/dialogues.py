"""Dialogues as the report's page shows them: short keys, visible text, and what one may filter by."""

from typing import Any

from maporl.report.charts import finite
from maporl.report.read import Run
from maporl.words import LONGEST, visible

MOST = 5000
"""Dialogues of a report; of longer runs, all of the last evaluation and an even selection of the others."""
FLAGS = {
    "improved": "an agent went from wrong to right",
    "declined": "an agent went from right to wrong",
    "disagreed": "the last answers differ",
    "penalised": "a penalty was given",
    "right": "every last answer is right",
    "some": "some last answers are right, some wrong",
    "wrong": "every last answer is wrong",
    "unread": "no answer could be read from a text",
    "cut": "an answer was cut off at the length limit",
}
KINDS = ("task", "subject", "type", "category", "level", "game", "source")


def entries(run: Run, number: int = 0, most: int = MOST) -> list[dict[str, Any]]:
    """The dialogues of the ``number``-th run of a page, evaluations first, then updates from the last to the first."""
    order: dict[int | str, int] = {"after": 0, "before": 1}
    chosen = sorted(run.dialogues, key=lambda d: (order.get(d[0], 2), -d[0] if isinstance(d[0], int) else 0))
    last = [d for d in chosen if d[0] == "after"]
    others = [d for d in chosen if d[0] != "after"]
    room = max(0, most - len(last))
    if len(others) > room:
        others = [others[i * len(others) // room] for i in range(room)]
    return [entry(when, record, number) for when, record in last[:most] + others]


def entry(when: int | str, record: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """One dialogue."""
    example = record["example"]
    said = [_utterance(u) for u in record["utterances"]]
    return {
        "run": number,
        "when": when,
        "id": str(example.get("id", "")),
        "question": visible(example.get("question", "")),
        "label": visible(example.get("answer", "")),
        "kind": kind_of(record),
        "outcome": None if record.get("outcome") is None else visible(str(record["outcome"])),
        "flags": flags_of(record),
        "said": said,
    }


def kind_of(record: dict[str, Any]) -> str | None:
    """The task, subject, level, ... that the example says it is of."""
    meta = record["example"].get("meta") or {}
    tags: dict[str, Any] = next((u.get("tags") for u in record["utterances"] if u.get("tags")), {})
    for name in KINDS:
        value = meta.get(name, tags.get(name))
        if isinstance(value, str | int) and str(value):
            return visible(str(value))
    return None


def graded(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The graded answers by turn; each utterance's own grade is a dictionary."""
    turns: dict[int, list[dict[str, Any]]] = {}
    for u in record["utterances"]:
        grade = u.get("grade") or {}
        if u.get("answers", True) and grade.get("correct") is not None:
            turns.setdefault(u["turn"], []).append(u)
    return [turns[t] for t in sorted(turns)]


def flags_of(record: dict[str, Any]) -> list[str]:
    """Those of :data:`FLAGS` that hold."""
    found = set()
    turns = graded(record)
    right: dict[str, bool] = {}
    for turn in turns:
        for u in turn:
            now, before = u["grade"]["correct"], right.get(u["agent"])
            if before is not None and before != now:
                found.add("improved" if now else "declined")
            right[u["agent"]] = now
    if turns:
        grades = [u["grade"] for u in turns[-1]]
        share = sum(g["correct"] for g in grades)
        found.add("right" if share == len(grades) else "some" if share else "wrong")
        if len({g["answer"] for g in grades}) > 1:
            found.add("disagreed")
    for u in record["utterances"]:
        rewards = u.get("rewards") or {}
        if any(value and (n.startswith("penalty/") or n == "missing_eos") for n, value in rewards.items()):
            found.add("penalised")
        if u.get("answers", True) and (u.get("grade") or {"answer": ""})["answer"] is None:
            found.add("unread")
        if u.get("stop") == "length":
            found.add("cut")
    return [name for name in FLAGS if name in found]


def _utterance(u: dict[str, Any]) -> dict[str, Any]:
    grade = u.get("grade") or {}
    trace = u.get("trace")
    return {
        "agent": visible(u["agent"]),
        "role": u.get("role"),
        "turn": u["turn"] + 1,
        "text": visible(u.get("text", "")),
        "restated": None if u.get("restated") is None else visible(u["restated"]),
        "answer": None if grade.get("answer") is None else visible(str(grade["answer"])),
        "correct": grade.get("correct"),
        "reason": visible(grade.get("reason", "")),
        "rewards": {name: finite(value) for name, value in (u.get("rewards") or {}).items()},
        "stop": u.get("stop"),
        "heard": [[m["role"], visible(m["content"])] for m in u.get("messages", [])],
        "trace": None if trace is None or len(u.get("text", "")) > LONGEST else _trace(trace),
    }


def _trace(trace: dict[str, Any]) -> dict[str, Any]:
    return {**trace, "pieces": [visible(piece) for piece in trace["pieces"]]}
