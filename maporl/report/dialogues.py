"""Dialogues as the report's page shows them: short keys, visible text, and what one may filter by."""

import math
from collections.abc import Sequence
from typing import Any

from maporl.report.charts import finite
from maporl.report.read import Run, When
from maporl.text import LONGEST, visible

MOST = 5000
"""Dialogues of a report; of longer runs, the last evaluation, the last updates, and an even selection of the others."""
TOKENS = 100_000
"""Tokens of a page that have their numbers; of more, those of dialogues that lie evenly over the run."""
LAST_UPDATES = 10
"""Of a run without an evaluation at its end, the updates that stand for what the team can do now."""
FLAGS = {
    "corrected": "an agent went from wrong to right",
    "spoiled": "an agent went from right to wrong",
    "disagreed": "the last answers differ",
    "penalised": "a penalty was given",
    "all right": "every last answer is right",
    "mixed": "some last answers are right, some wrong",
    "all wrong": "every last answer is wrong",
    "unreadable": "no answer could be read from a text",
    "cut off": "an answer was cut off at the length limit",
    "illegal": "an illegal move ended the game",
}
KINDS = ("task", "subject", "type", "category", "level", "game", "source")
UNGRADED = ("disagreed", "all right", "mixed", "all wrong", "corrected", "spoiled", "unreadable")
"""Flags that say nothing of a game, where players answer different questions."""


def newest(run: Run) -> list[dict[str, Any]]:
    """What the team says now: the evaluation after training, else the dialogues of the last updates."""
    after = run.of("after")
    steps = [when for when, _ in run.dialogues if isinstance(when, int)]
    return after or [r for w, r in run.dialogues if steps and isinstance(w, int) and w > max(steps) - LAST_UPDATES]


def entries(run: Run, number: int = 0, most: int = MOST) -> list[dict[str, Any]]:
    """The dialogues of the ``number``-th run of a page, evaluations first, then updates from the last to the first."""
    order: dict[When, int] = {"after": 0, "before": 1}
    chosen = sorted(run.dialogues, key=lambda d: (order.get(d[0], 2), -d[0] if isinstance(d[0], int) else 0))
    now = {id(record) for record in newest(run)}
    others = [record for _, record in chosen if id(record) not in now]
    room = max(0, most - len(now))
    if len(others) > room:
        others = [others[i * len(others) // room] for i in range(room)]
    kept = {id(record) for record in others} | now
    return shown([(when, record) for when, record in chosen if id(record) in kept][:most], number)


def shown(dialogues: Sequence[tuple[When, dict[str, Any]]], number: int = 0) -> list[dict[str, Any]]:
    """The entries of ``dialogues``, with the numbers of as many tokens as a page holds."""
    tokens = [
        sum(len((u.get("trace") or {}).get("pieces", ())) for u in record["utterances"]) for _, record in dialogues
    ]
    share = min(1.0, TOKENS / max(1, sum(tokens)))
    found, owed = [], 0.0
    for (when, record), own in zip(dialogues, tokens, strict=True):
        owed += share * own
        traced = owed >= own
        owed -= own if traced else 0
        found.append(entry(when, record, number, traced))
    return found


def entry(when: When, record: dict[str, Any], number: int = 0, traced: bool = True) -> dict[str, Any]:
    """One dialogue. Its ``key`` is the same in every report of the run. ``traced``: with the numbers of its tokens."""
    example = record["example"]
    game = game_of(record)
    return {
        "run": number,
        "key": f"{number}/{visible(record.get('key', example.get('id')))}",
        "when": when,
        "id": visible(example.get("id")),
        "question": visible(example.get("question")) or (f"{game}: {_state(record)}" if game else ""),
        "label": visible(example.get("answer")),
        "kind": kind_of(record),
        "game": game is not None,
        "outcome": outcome_of(record),
        "flags": flags_of(record),
        "said": [_utterance(u, traced) for u in record["utterances"]],
    }


def game_of(record: dict[str, Any]) -> str | None:
    """The name of the game that was played, None where the dialogue is no game."""
    names = [u["tags"]["game"] for u in record["utterances"] if "game" in (u.get("tags") or {})]
    return visible(names[0]) if names else None


def _state(record: dict[str, Any]) -> str:
    """What the players saw, as it went on."""
    return " | ".join(visible(u["tags"].get("state")) for u in record["utterances"] if u.get("tags"))


def outcome_of(record: dict[str, Any]) -> str | None:
    """How the dialogue ended, in words; what each player was paid, where it was a game."""
    outcome = record.get("outcome")
    if isinstance(outcome, dict):
        return ", ".join(f"{visible(agent)} {paid:+g}" for agent, paid in outcome.items() if finite(paid) is not None)
    return None if outcome is None else visible(outcome)


def kind_of(record: dict[str, Any]) -> str | None:
    """The task, subject, level, ... that the example says it is of."""
    meta = record["example"].get("meta") or {}
    tags: dict[str, Any] = next((u.get("tags") for u in record["utterances"] if u.get("tags")), {})
    for name in KINDS:
        value = meta.get(name, tags.get(name))
        if isinstance(value, str | int) and str(value):
            return visible(value)
    return None


def graded(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The graded answers by turn; each utterance's own grade is a dictionary."""
    turns: dict[int, list[dict[str, Any]]] = {}
    for u in record["utterances"]:
        grade = u.get("grade") or {}
        if u.get("answers", True) and grade.get("correct") is not None:
            turns.setdefault(u["turn"], []).append(u)
    return [turns[t] for t in sorted(turns)]


def last_answers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The graded answers of the last turn; in a game each player's own last move."""
    turns = graded(record)
    if game_of(record) is not None:
        return list({u["agent"]: u for turn in turns for u in turn}.values())
    return turns[-1] if turns else []


def flags_of(record: dict[str, Any]) -> list[str]:
    """Those of :data:`FLAGS` that hold."""
    found = set()
    right: dict[str, bool] = {}
    for u in (u for turn in graded(record) for u in turn):
        now, before = u["grade"]["correct"], right.get(u["agent"])
        if before is not None and before != now:
            found.add("corrected" if now else "spoiled")
        right[u["agent"]] = now
    grades = [u["grade"] for u in last_answers(record)]
    if grades:
        share = sum(g["correct"] for g in grades)
        found.add("all right" if share == len(grades) else "mixed" if share else "all wrong")
        if len({str(g["answer"]) for g in grades}) > 1:
            found.add("disagreed")
    for u in record["utterances"]:
        rewards = u.get("rewards") or {}
        if any(value and (n.startswith("penalty/") or n == "missing_eos") for n, value in rewards.items()):
            found.add("penalised")
        if u.get("answers", True) and (u.get("grade") or {"answer": ""})["answer"] is None:
            found.add("unreadable")
        if u.get("stop") == "length":
            found.add("cut off")
    if game_of(record) is not None:
        found -= set(UNGRADED)
        found |= {"illegal"} if record.get("outcome") == "illegal" else set()
    return [name for name in FLAGS if name in found]


def _utterance(u: dict[str, Any], traced: bool) -> dict[str, Any]:
    grade = u.get("grade") or {}
    trace = u.get("trace") if traced else None
    return {
        "agent": visible(u["agent"]),
        "role": visible(u.get("role")) or None,
        "turn": u["turn"] + 1,
        "text": visible(u.get("text")),
        "restated": None if u.get("restated") is None else visible(u["restated"]),
        "answer": None if grade.get("answer") is None else visible(grade["answer"]),
        "correct": grade.get("correct"),
        "reason": visible(grade.get("reason")),
        "rewards": {visible(name): finite(value) for name, value in (u.get("rewards") or {}).items()},
        "stop": visible(u.get("stop")),
        "heard": [[visible(m.get("role")), visible(m.get("content"))] for m in u.get("messages") or []],
        "trace": None if not trace or len(u.get("text") or "") > LONGEST else _trace(trace),
    }


def _trace(trace: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: trace.get(name) for name in ("logprobs", "advantages", "values")}
    return {
        "pieces": [visible(piece) for piece in trace["pieces"]],
        **{name: _finite(own) for name, own in numbers.items()},
    }


def _finite(numbers: list[Any] | None) -> list[Any] | None:
    if numbers is None or all(isinstance(x, float) and math.isfinite(x) for x in numbers):
        return numbers
    return [finite(x) for x in numbers]
