"""Where a team still fails: sentences that count its last dialogues, each with the dialogues it counts, and tables."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from maporl.evaluation.metrics import Share
from maporl.report.charts import finite
from maporl.report.dialogues import LAST_UPDATES, flags_of, game_of, kind_of, last_answers, newest, right_share
from maporl.report.language import counted
from maporl.report.read import Recorded, Run
from maporl.text import visible
from maporl.types import Example, Grade, Stop


def failures(run: Run) -> dict[str, Any]:
    """Failures on the held-out questions after training, or else in the dialogues of the last updates.

    ``scope`` says what was counted. ``lines`` are sentences, each with the ``keys`` of the dialogues that it counts.
    ``groups`` are tables of accuracy by a property of the question.
    """
    held_out = bool(run.of("after"))
    last = [one for one in newest(run) if last_answers(one.dialogue)]
    if not last:
        return {"scope": "", "lines": [], "groups": []}
    if game_of(last[0].dialogue) is not None:
        what = "game"
        lines, groups = _game_lines(last), []
    else:
        what = "question" if held_out else "dialogue"
        before = run.of("before") if held_out else []
        earlier = {one.dialogue.example.id: one for one in before if last_answers(one.dialogue)}
        lines, groups = _lines(last, what), _groups(last, earlier)
    scope = counted(len(last), f"held-out {what}") + " after training"
    if not held_out:
        scope = f"{counted(len(last), what)} recorded in the last {LAST_UPDATES} updates"
    shown = [
        {"text": visible(text), "keys": [visible(one.key) for one in dialogues]}
        for text, dialogues in lines
        if dialogues
    ]
    return {"scope": scope, "lines": shown, "groups": groups}


def _lines(played: list[Recorded], unit: str) -> list[tuple[str, list[Recorded]]]:
    total = len(played)

    def of(part: list[Recorded]) -> str:
        return f"{len(part)} of {total} {unit}s ({len(part) / total:.1%})"

    flags = [set(flags_of(one.dialogue)) for one in played]
    nobody, some, spoiled = (
        [d for d, names in zip(played, flags, strict=True) if flag in names]
        for flag in ("all wrong", "mixed", "spoiled")
    )
    several = any(len(last_answers(one.dialogue)) > 1 for one in played)
    lines = [
        (f"{'Nobody is right at the end' if several else 'The last answer is wrong'} on {of(nobody)}.", nobody),
        (f"On {of(some)} one agent is right at the end and another is wrong.", some),
        (f"On {of(spoiled)} an agent gave up a right answer on the way.", spoiled),
    ]
    wrong = [(one, u, grade) for one in played for u, grade in last_answers(one.dialogue) if not grade.correct]
    unread = [one for one, _, grade in wrong if grade.answer is None]
    cut = [one for one, u, _ in wrong if u.stop == Stop.LENGTH]
    for cases, what in ((unread, "could not be read"), (cut, "reached the length limit")):
        if cases:
            share = f"{len(cases)} ({len(cases) / len(wrong):.1%})"
            lines.append((f"Of {counted(len(wrong), 'wrong last answer')}, {share} {what}.", _once(cases)))
    distances = [(one, d) for one, _, grade in wrong if (d := _distance(grade, one.dialogue.example))]
    for distance, n in Counter(d for _, d in distances).most_common(3):
        if n >= max(3, 0.1 * len(distances)):
            cases = [one for one, d in distances if d == distance]
            share = f"{n} ({n / len(distances):.1%})"
            told = (
                f"Of {counted(len(distances), 'wrong last answer')} that are whole numbers, {share} are off by "
                f"{distance}"
            )
            lines.append((f"{told}, on {counted(len(_once(cases)), unit)}.", _once(cases)))
    return lines


def _game_lines(played: list[Recorded]) -> list[tuple[str, list[Recorded]]]:
    ended = [one for one in played if one.dialogue.outcome == "illegal"]
    illegal = [(one, u, grade) for one in ended for u, grade in last_answers(one.dialogue) if not grade.correct]
    total = counted(len(played), "game")
    lost_by_it = _once([one for one, *_ in illegal])
    lines = [(f"{len(lost_by_it)} of {total} ended with an illegal move.", lost_by_it)]
    speakers = {one.number: {u.agent for u in one.dialogue.utterances} for one in played}
    for agent in sorted(set().union(*speakers.values())):
        moved = [one for one in played if agent in speakers[one.number]]
        cases = [one for one, u, _ in illegal if u.agent == agent]
        games = counted(len(moved), "game")
        lines.append((f"{agent} moved illegally in {len(cases)} of the {games} in which it moved.", _once(cases)))
        lost = [one for one in moved if _paid(one, agent) < 0]
        lines.append((f"{agent} lost {len(lost)} of {total}.", lost))
    cut = [one for one, u, _ in illegal if u.stop == Stop.LENGTH]
    lines.append((f"Of {counted(len(illegal), 'illegal move')}, {len(cut)} reached the length limit.", _once(cut)))
    moves = [(one, str(grade.answer).strip()[:40]) for one, _, grade in illegal]
    repeated = Counter(move for _, move in moves).most_common(1)
    if repeated and repeated[0][1] > 1:
        text, n = repeated[0]
        cases = [one for one, move in moves if move == text]
        told = f"The most common illegal move is \u201c{text}\u201d: {n} of {counted(len(illegal), 'illegal move')}."
        lines.append((told, _once(cases)))
    return lines


def _paid(one: Recorded, agent: str) -> float:
    """What the outcome of a game says that ``agent`` was paid; 0 where it does not say."""
    outcome = one.dialogue.outcome
    return finite(outcome.get(agent)) or 0.0 if isinstance(outcome, dict) else 0.0


def _once(played: list[Recorded]) -> list[Recorded]:
    return list(dict.fromkeys(played))


def _distance(grade: Grade, example: Example) -> int | None:
    """How far a wrong whole number is from the right one."""
    told, truth = _whole(grade.answer), _whole(example.answer)
    return abs(told - truth) if told is not None and truth is not None else None


def _whole(text: str | None) -> int | None:
    text = (text or "").strip().replace(",", "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,17}", text) else None


def _groups(played: list[Recorded], earlier: dict[str, Recorded]) -> list[dict[str, Any]]:
    """Accuracy at the end by the kind of a question, the length of its answer, and its own length."""
    sizes = sorted(len(one.dialogue.example.question) for one in played)
    few = len(set(sizes)) <= 6
    low, high = sizes[len(sizes) // 3], sizes[2 * len(sizes) // 3]

    def length(one: Recorded) -> str:
        size = len(one.dialogue.example.question)
        if few:
            return str(size)
        return f"up to {low}" if size <= low else f"{low + 1} to {high}" if size <= high else f"over {high}"

    properties: dict[str, tuple[str, Callable[[Recorded], str | None]]] = {
        "Kind": ("kind", lambda one: kind_of(one.dialogue)),
        "Length of the right answer": ("characters", lambda one: str(len(one.dialogue.example.answer))),
        "Length of the question": ("characters", length),
    }
    tables = []
    for title, (column, of) in properties.items():
        parts: dict[str, list[Recorded]] = {}
        for one in played:
            value = of(one)
            if value is not None:
                parts.setdefault(value, []).append(one)
        if 2 <= len(parts) <= 12:
            rows = [
                _row(name, dialogues, earlier)
                for name, dialogues in sorted(parts.items(), key=lambda p: _in_order(p[0]))
            ]
            tables.append({"title": title, "column": column, "rows": rows})
    return tables


def _in_order(name: str) -> tuple[bool, int, str]:
    """The order of a table's rows: by number, and "over ..." last."""
    number = re.search(r"\d+", name)
    return (name.startswith("over"), int(number[0]) if number else 0, name)


def _row(name: str, played: list[Recorded], earlier: dict[str, Recorded]) -> dict[str, Any]:
    names = [one.dialogue.example.id for one in played]
    before = [earlier[question] for question in names if question in earlier]
    now = _right(played)
    low, high = now.interval()
    return {
        "name": name,
        "questions": now.total,
        "now": now.value,
        "low": low,
        "high": high,
        "before": _right(before).value if before else None,
    }


def _right(played: list[Recorded]) -> Share:
    """The share of last answers that are right, over questions: dialogues on one question are not independent."""
    by_question: dict[str, list[float]] = {}
    for one in played:
        by_question.setdefault(one.dialogue.example.id, []).append(right_share(one.dialogue))
    return Share(sum(sum(shares) / len(shares) for shares in by_question.values()), len(by_question))
