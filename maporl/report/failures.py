"""Where a team still fails: counts of its last dialogues in sentences, each with the dialogues it counts, and tables."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from maporl.evaluation.metrics import Share
from maporl.report.charts import finite
from maporl.report.dialogues import LAST_UPDATES, flags_of, game_of, graded, kind_of, last_answers, newest
from maporl.report.language import counted
from maporl.report.read import Run
from maporl.text import visible

Record = dict[str, Any]


def failures(run: Run) -> dict[str, Any]:
    """On the held-out questions after training, else in the last updates that were recorded.

    ``lines``: sentences, each with the ``keys`` of the dialogues that it counts; ``groups``: tables of accuracy by a property of
    the question.
    """
    held_out = bool(run.of("after"))
    last = [record for record in newest(run) if last_answers(record)]
    if not last:
        return {"scope": "", "lines": [], "groups": []}
    if game_of(last[0]) is not None:
        scope = counted(len(last), "held-out game") if held_out else counted(len(last), "game")
        lines, groups = _game_lines(last), []
    else:
        scope = counted(len(last), "held-out question") if held_out else counted(len(last), "dialogue")
        earlier = {r["example"].get("id"): r for r in run.of("before") if last_answers(r)} if held_out else {}
        lines, groups = _lines(last, "question" if held_out else "dialogue"), _groups(last, earlier)
    scope += " after training" if held_out else f" that were recorded of the last {LAST_UPDATES} updates"
    shown = [{"text": visible(text), "keys": [visible(record["key"]) for record in own]} for text, own in lines if own]
    return {"scope": scope, "lines": shown, "groups": groups}


def _lines(records: list[Record], unit: str) -> list[tuple[str, list[Record]]]:
    total = len(records)

    def of(own: list[Record]) -> str:
        return f"{len(own)} of {total} {unit}s ({len(own) / total:.0%})"

    flags = [set(flags_of(record)) for record in records]
    nobody, some, spoiled = (
        [r for r, own in zip(records, flags, strict=True) if flag in own] for flag in ("all wrong", "mixed", "spoiled")
    )
    several = any(len(last_answers(record)) > 1 for record in records)
    lines = [
        (f"{'Nobody is right' if several else 'The last answer is wrong'} at the end on {of(nobody)}.", nobody),
        (f"On {of(some)} one agent is right at the end and another wrong.", some),
        (f"On {of(spoiled)} an agent gave up a right answer on the way.", spoiled),
    ]
    wrong = [(r, u) for r in records for u in last_answers(r) if not u["grade"]["correct"]]
    unread = [(r, u) for r, u in wrong if u["grade"]["answer"] is None]
    cut = [(r, u) for r, u in wrong if u.get("stop") == "length"]
    for own, what in ((unread, "could not be read"), (cut, "reached the length limit")):
        if own:
            share = f"{len(own)} ({len(own) / len(wrong):.0%})"
            lines.append((f"Of {counted(len(wrong), 'wrong last answer')}, {share} {what}.", _once(own)))
    distances = [(record, u, d) for record, u in wrong if (d := _distance(record, u))]
    for distance, n in Counter(d for *_, d in distances).most_common(3):
        if n >= max(3, 0.1 * len(distances)):
            own = [(record, u) for record, u, d in distances if d == distance]
            share = f"{n} ({n / len(distances):.0%})"
            told = f"Of {counted(len(distances), 'wrong last answer')} that are whole numbers, {share} are off by {distance}"
            lines.append((f"{told}, on {counted(len(_once(own)), unit)}.", _once(own)))
    return lines


def _game_lines(records: list[Record]) -> list[tuple[str, list[Record]]]:
    illegal = [
        (r, u) for r in records if r.get("outcome") == "illegal" for u in last_answers(r) if not u["grade"]["correct"]
    ]
    total = counted(len(records), "game")
    lines = [(f"{len(_once(illegal))} of {total} ended by an illegal move.", _once(illegal))]
    for agent in sorted({u["agent"] for r in records for u in r["utterances"]}):
        moved = [r for r in records if any(u["agent"] == agent for u in r["utterances"])]
        own = [(r, u) for r, u in illegal if u["agent"] == agent]
        lines.append((f"{agent} moved illegally in {len(own)} of the {len(moved)} in which it moved.", _once(own)))
        lost = [r for r in moved if isinstance(r.get("outcome"), dict) and (finite(r["outcome"].get(agent)) or 0) < 0]
        lines.append((f"{agent} lost {len(lost)} of {total}.", lost))
    cut = [(r, u) for r, u in illegal if u.get("stop") == "length"]
    lines.append((f"Of {counted(len(illegal), 'illegal move')}, {len(cut)} reached the length limit.", _once(cut)))
    repeated = Counter(str(u["grade"]["answer"]).strip()[:40] for _, u in illegal).most_common(1)
    if repeated and repeated[0][1] > 1:
        text, n = repeated[0]
        own = [(r, u) for r, u in illegal if str(u["grade"]["answer"]).strip()[:40] == text]
        lines.append((f"The commonest illegal move is \u201c{text}\u201d: {n} of {len(illegal)}.", _once(own)))
    return lines


def _once(pairs: list[tuple[Record, Record]]) -> list[Record]:
    return list({id(record): record for record, _ in pairs}.values())


def _distance(record: Record, u: Record) -> int | None:
    """How far a wrong whole number is from the truth."""
    told, truth = _whole(u["grade"]["answer"]), _whole(record["example"].get("answer"))
    return abs(told - truth) if told is not None and truth is not None else None


def _whole(text: Any) -> int | None:
    text = str(text).strip().replace(",", "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,17}", text) else None


def _groups(records: list[Record], earlier: dict[Any, Record]) -> list[dict[str, Any]]:
    """Accuracy at the end, by what kind a question is of, how long its answer is, and how long it is itself."""
    lengths = sorted({len(str(r["example"].get("question", ""))) for r in records})
    thirds = sorted(len(str(r["example"].get("question", ""))) for r in records)
    bounds = [thirds[len(thirds) // 3], thirds[2 * len(thirds) // 3]] if len(lengths) > 6 else lengths

    def length(record: Record) -> str:
        own = len(str(record["example"].get("question", "")))
        if len(lengths) <= 6:
            return str(own)
        return (
            f"up to {bounds[0]}"
            if own <= bounds[0]
            else f"{bounds[0] + 1} to {bounds[1]}"
            if own <= bounds[1]
            else f"over {bounds[1]}"
        )

    properties: dict[str, tuple[str, Callable[[Record], str | None]]] = {
        "Kind": ("kind", kind_of),
        "Length of the right answer": ("characters", lambda r: str(len(str(r["example"].get("answer", ""))))),
        "Length of the question": ("characters", length),
    }
    tables = []
    for title, (column, of) in properties.items():
        parts: dict[str, list[Record]] = {}
        for record in records:
            value = of(record)
            if value is not None:
                parts.setdefault(value, []).append(record)
        if 2 <= len(parts) <= 12:
            rows = [_row(name, own, earlier) for name, own in sorted(parts.items(), key=lambda p: _in_order(p[0]))]
            tables.append({"title": title, "column": column, "rows": rows})
    return tables


def _in_order(name: str) -> tuple[bool, int, str]:
    """Numbers by size, "over" last."""
    number = re.search(r"\d+", name)
    return (name.startswith("over"), int(number[0]) if number else 0, name)


def _row(name: str, records: list[Record], earlier: dict[Any, Record]) -> dict[str, Any]:
    known = [earlier[r["example"].get("id")] for r in records if r["example"].get("id") in earlier]
    now = _right(records)
    low, high = now.interval()
    return {
        "name": name,
        "questions": now.total,
        "now": now.value,
        "low": low,
        "high": high,
        "before": _right(known).value if known else None,
    }


def right_share(record: Record, turn: int = -1) -> float:
    """The share of a turn's graded answers that are right."""
    answers = graded(record)[turn]
    return sum(u["grade"]["correct"] for u in answers) / len(answers)


def _right(records: list[Record]) -> Share:
    """Over questions: dialogues on the same question are no independent samples of it."""
    own: dict[Any, list[float]] = {}
    for record in records:
        own.setdefault(record["example"].get("id"), []).append(right_share(record))
    return Share(sum(sum(shares) / len(shares) for shares in own.values()), len(own))
