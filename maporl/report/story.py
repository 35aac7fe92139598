"""What a run's numbers say, in sentences: what the team is, what it learned, whether talking helps, where it still fails."""

from collections import Counter
from typing import Any

from maporl.evaluation import Share
from maporl.report.charts import last_turn
from maporl.report.dialogues import graded, kind_of
from maporl.report.read import Run
from maporl.words import visible


def story(run: Run) -> list[dict[str, str]]:
    """Headed paragraphs, in plain words."""
    parts = [("The team", _team(run)), ("What it learned", _learned(run)), ("Does talking help?", _talking(run))]
    return [{"title": title, "text": visible(text)} for title, text in parts if text]


def failures(run: Run) -> dict[str, Any]:
    """Where the team is still wrong: on the held-out questions after training, else on the last update that was recorded.

    ``groups``: tables of accuracy by a property of the question; ``lines``: sentences, each with the flag that shows its dialogues.
    """
    last = [record for when, record in run.dialogues if when == "after"]
    scope, when = f"the {len(last)} held-out questions after training", "after"
    if not last:
        steps = [w for w, _ in run.dialogues if isinstance(w, int)]
        last = [record for w, record in run.dialogues if steps and isinstance(w, int) and w > max(steps) - 10]
        scope, when = f"the {len(last)} dialogues recorded of the last updates", "train"
    last = [record for record in last if graded(record)]
    if not last:
        return {"scope": "", "when": when, "lines": [], "groups": []}
    lines = _failure_lines(last)
    earlier = (
        {r["example"].get("id"): r for w, r in run.dialogues if w == "before" and graded(r)} if when == "after" else {}
    )
    return {"scope": scope, "when": when, "lines": lines, "groups": _groups(last, earlier)}


# -- sentences ----------------------------------------------------------------------------------------------------


def _team(run: Run) -> str:
    agents = run.config.get("agents") or {}
    protocol, task = run.config.get("protocol") or {}, run.config.get("task") or {}
    updates = run.updates()
    done, wanted = (updates[-1]["step"] if updates else 0), run.config.get("updates")
    names = [f"{name} ({_model(section or {})})" for name, section in agents.items()]
    if not names:
        names = sorted({u["agent"] for _, record in run.dialogues for u in record["utterances"]})
    who = _listed(names) or "agents that have not spoken yet"
    turns = f", {protocol['turns']} turns" if protocol.get("turns") else ""
    what = f" play {protocol.get('name', 'debate')}{turns} on {task['name']}" if task.get("name") else " talk"
    how_far = f"{done} updates" if run.finished or wanted is None else f"update {done} of {wanted}"
    state = "after" if run.finished else "so far"
    return f"{who}{what}; {state} {how_far}."


def _learned(run: Run) -> str:
    if run.after is not None:
        now = _share(run.after["turns"][-1]["team"])
        if run.before is None or not run.before["turns"]:
            return f"After training, the last turn is right on {_percent(now)} of {now.total} held-out questions."
        was = _share(run.before["turns"][-1]["team"])
        gain = 100 * (now.value - was.value)
        apart = now.interval()[0] > was.interval()[1] or now.interval()[1] < was.interval()[0]
        verdict = (
            "The intervals do not overlap: that is more than chance."
            if apart
            else "The intervals overlap: chance may be all there is to it."
        )
        return (
            f"On {now.total} held-out questions, answers of the last turn were right {_percent(was)} of the time before training and "
            f"{_percent(now)} after it: {gain:+.1f} points. {verdict}"
        )
    keys = last_turn(run, r"accuracy/turn_(\d+)")
    points = [(r["step"], r[key]) for r in run.updates() for key in keys if key in r]
    if not points:
        return "Nothing has been trained yet."
    few = max(1, min(10, len(points) // 4))
    first, last = (sum(v for _, v in part) / len(part) for part in (points[:few], points[-few:]))
    return (
        f"On the questions it trains on, answers of the last turn are right {last:.1%} of the time (mean of the last {few} updates); in the "
        f"first {few} it was {first:.1%}. There is no evaluation on held-out questions after training."
    )


def _talking(run: Run) -> str:
    report = run.after
    if report is None or len(report["turns"]) < 2:
        return ""
    first, last = (_share(report["turns"][i]["team"]) for i in (0, -1))
    better = sum(f["wrong_to_right"] for f in report["flips"])
    worse = sum(f["right_to_wrong"] for f in report["flips"])
    gain = 100 * (last.value - first.value)
    verdict = "Yes" if gain > 0 and better > worse else "No" if gain <= 0 else "Hardly"
    return (
        f"{verdict}: answers of the first turn are right {_percent(first)} of the time, those of the last {_percent(last)} "
        f"({gain:+.1f} points). Between turns {better} answers were corrected and {worse} were spoiled."
    )


def _failure_lines(records: list[dict[str, Any]]) -> list[dict[str, str]]:
    total = len(records)
    finals = [graded(r)[-1] for r in records]
    nobody = sum(not any(u["grade"]["correct"] for u in final) for final in finals)
    some = sum(0 < sum(u["grade"]["correct"] for u in final) < len(final) for final in finals)
    declined = sum(_declined(r) for r in records)
    wrong = [(r, u) for r, final in zip(records, finals, strict=True) for u in final if not u["grade"]["correct"]]
    lines = [
        {
            "text": f"Nobody is right at the end on {nobody} of {total} questions ({nobody / total:.0%}).",
            "flag": "wrong",
        }
    ]
    if some:
        lines.append(
            {"text": f"On {some} ({some / total:.0%}) one agent is right at the end and another wrong.", "flag": "some"}
        )
    if declined:
        lines.append(
            {
                "text": f"On {declined} ({declined / total:.0%}) an agent gave up a right answer on the way.",
                "flag": "declined",
            }
        )
    if wrong:
        unread = sum(u["grade"]["answer"] is None for _, u in wrong)
        cut = sum(u.get("stop") == "length" for _, u in wrong)
        if unread:
            lines.append(
                {
                    "text": f"Of {len(wrong)} wrong last answers, {unread} ({unread / len(wrong):.0%}) could not be read.",
                    "flag": "unread",
                }
            )
        if cut:
            lines.append(
                {"text": f"{cut} of them ({cut / len(wrong):.0%}) were cut off at the length limit.", "flag": "cut"}
            )
        off = _offsets(wrong)
        if off:
            lines.append(
                {"text": f"Where a wrong answer is a whole number, it is most often off by {off}.", "flag": "wrong"}
            )
    return lines


def _declined(record: dict[str, Any]) -> bool:
    right: dict[str, bool] = {}
    for u in (u for turn in graded(record) for u in turn):
        if right.get(u["agent"]) and not u["grade"]["correct"]:
            return True
        right[u["agent"]] = u["grade"]["correct"]
    return False


def _offsets(wrong: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The commonest distances of wrong whole numbers from the truth, where some are common."""
    distances = []
    for record, u in wrong:
        told, truth = _whole(u["grade"]["answer"]), _whole(record["example"].get("answer"))
        if told is not None and truth is not None and told != truth:
            distances.append(abs(told - truth))
    common = [(d, n) for d, n in Counter(distances).most_common(3) if n >= max(3, 0.1 * len(distances))]
    return _listed([f"{d} ({n / len(distances):.0%})" for d, n in common])


def _whole(text: Any) -> int | None:
    text = str(text).strip().replace(",", "")
    return int(text) if len(text) < 18 and text.lstrip("-").isascii() and text.lstrip("-").isdigit() else None


def _groups(records: list[dict[str, Any]], earlier: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy at the end, by what kind a question is of, how long its answer is, and how long it is itself."""
    lengths = sorted(len(r["example"].get("question", "")) for r in records)
    third = len(lengths) // 3
    bounds = (lengths[third], lengths[2 * third])

    def length(record: dict[str, Any]) -> str:
        own = len(record["example"].get("question", ""))
        return (
            f"up to {bounds[0]}"
            if own <= bounds[0]
            else f"up to {bounds[1]}"
            if own <= bounds[1]
            else f"over {bounds[1]}"
        )

    properties = {
        "kind": kind_of,
        "characters of the right answer": lambda r: f"{len(str(r['example'].get('answer', ''))):d}",
        "characters of the question": length,
    }
    tables = []
    for title, of in properties.items():
        parts: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            value = of(record)
            if value is not None:
                parts.setdefault(value, []).append(record)
        if 2 <= len(parts) <= 12:
            rows = [_row(name, own, earlier) for name, own in sorted(parts.items(), key=lambda p: (len(p[0]), p[0]))]
            tables.append({"title": title, "rows": rows})
    return tables


def _row(name: str, records: list[dict[str, Any]], earlier: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    known = [earlier[r["example"].get("id")] for r in records if r["example"].get("id") in earlier]
    before = _right(known) if known else None
    now = _right(records)
    low, high = now.interval()
    return {
        "name": name,
        "questions": len(records),
        "now": now.value,
        "low": low,
        "high": high,
        "before": None if before is None else before.value,
    }


def _right(records: list[dict[str, Any]]) -> Share:
    finals = [graded(r)[-1] for r in records]
    return Share(sum(sum(u["grade"]["correct"] for u in final) / len(final) for final in finals), len(finals))


# -- words --------------------------------------------------------------------------------------------------------


def _share(entry: dict[str, Any]) -> Share:
    return Share(entry["count"], entry["total"])


def _percent(share: Share) -> str:
    low, high = share.interval()
    return f"{share.value:.1%} ({100 * low:.1f} to {high:.1%})"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def _model(section: dict[str, Any]) -> str:
    if section.get("engine") == "human":
        return "a person"
    if section.get("tiny") is not None:
        tiny = section["tiny"]
        what = f"tiny {tiny.get('architecture', 'llama')}, {tiny.get('layers', 2)} layers"
    else:
        what = str(
            section.get("model")
            or (section.get("api") or {}).get("model")
            or f"speaks with {section.get('policy')}'s weights"
        )
    return what + (", LoRA" if section.get("lora") else "") + ("" if section.get("trainable", True) else ", frozen")
