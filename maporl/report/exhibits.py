"""Two dialogues for the first screen of a page: one in which talking changed an answer for the better, and one for the
worse.

Of a run with one turn they show what training changed; of a run without labels, which scores talking changed most; and
of games, one that was played to its end and one that was not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from maporl.report.charts import finite
from maporl.report.dialogues import LAST_UPDATES, game_of, graded, kind_of, last_answers, newest, outcome_of
from maporl.report.language import counted, listed
from maporl.report.read import Recorded, Run
from maporl.report.story import is_game
from maporl.text import visible
from maporl.types import Utterance

MOST_LINES, MOST_CHARACTERS = 4, 1500
"""Of a longer dialogue only the lines that matter are shown, and of a longer text its beginning."""


LONG = 80
"""Beside a text of more characters than this stands the answer that was read in it."""


@dataclass(frozen=True)
class Change:
    """An answer that changed: the agent's earlier answer, its next one, and the dialogue in which it was given."""

    one: Recorded
    was: Utterance
    now: Utterance
    size: float = 1.0


def exhibits(run: Run) -> list[dict[str, Any]]:
    """The two dialogues, or words in place of one that the run does not have. Empty before anything was played."""
    if not run.dialogues:
        return []
    if is_game(run):
        return _games(run)
    pool = newest(run) or run.dialogues
    several = any(u.turn > 0 for one in pool for u in one.dialogue.answers())
    labelled = any(graded(one.dialogue) for one in pool)
    if not labelled:
        return _scored(pool, several)
    return [_by_talking(run, to) if several else _by_training(run, to) for to in (True, False)]


# -- right and wrong answers ----------------------------------------------------------------------------------------


def _by_talking(run: Run, to: bool) -> dict[str, Any]:
    """An answer that was wrong in an agent's earlier turn and right in its next (``to``), or the other way round."""
    title = f"Talking {'made an answer right' if to else 'spoiled a right answer'}"
    held_out = run.of("after")
    found = _clearest(change for one in held_out for change in _changes(one, to))
    words = ("wrong", "right") if to else ("right", "wrong")
    held_out_too = ""
    if found is None:
        missing, what = "", f"{words[0]} answer became {words[1]}"
        if held_out:
            missing = f"No {what} in {counted(len(held_out), 'held-out dialogue')} after training."
        others = [one for one in run.dialogues if isinstance(one.when, int)]
        newest_update = max((one.when for one in others), default=0)
        recent = [one for one in others if one.when > newest_update - LAST_UPDATES]  # type: ignore[operator]
        found = _clearest(change for one in recent for change in _changes(one, to))
        if found is None:
            played = f"{counted(len(recent), 'dialogue')} recorded in the last {LAST_UPDATES} updates"
            also = f"{missing} Nor did one in {played}." if missing else f"No {what} in {played}."
            return _empty(title, also if recent else missing or f"No {what}.")
        title += " in training"
        if held_out:
            asked = counted(len(held_out), "dialogue")
            held_out_too = f" On held-out questions no {what} after training ({asked})."
    heard = _heard(found, to)
    told = (
        f"{found.now.agent} was {words[0]} in turn {found.was.turn + 1}{heard} and is {words[1]} in turn "
        f"{found.now.turn + 1}."
    )
    return _exhibit(title, told + held_out_too, found.one, _lines(found))


def _changes(one: Recorded, to: bool) -> list[Change]:
    """The answers of a dialogue that became right (``to``) or wrong from an agent's turn to its next."""
    last: dict[str, tuple[Utterance, bool]] = {}
    changes = []
    for u, grade in (answer for turn in graded(one.dialogue) for answer in turn):
        now = bool(grade.correct)
        if u.agent in last and last[u.agent][1] != now and now == to:
            changes.append(Change(one, last[u.agent][0], u))
        last[u.agent] = (u, now)
    return changes


def _clearest(changes: Iterable[Change]) -> Change | None:
    """The change that reads best: its agent was shown another answer, nothing changed back, and it is short."""

    def order(change: Change) -> tuple[bool, bool, int, int]:
        dialogue = change.one.dialogue
        to = bool(change.now.grade and change.now.grade.correct)
        length = sum(len(u.text) for u in dialogue.utterances)
        return (not change.now.parents, bool(_changes(change.one, not to)), length, change.one.number)

    return min(changes, key=order, default=None)


def _heard(change: Change, right: bool) -> str:
    """Whose right or wrong answers the agent was shown in between, or who else spoke to it, in words."""
    said = {u.id: u for u in change.one.dialogue.utterances}
    others = [said[p] for p in change.now.parents if p in said and said[p].agent != change.now.agent]
    answered = list(dict.fromkeys(u.agent for u in others if _is(u, right)))
    spoke = list(dict.fromkeys(u.agent for u in others if u.grade is None or u.grade.correct is None or not u.answers))
    if answered:
        what = f"{listed(answered)}\u2019s {'right' if right else 'wrong'} answer"
        return f", was shown {what}{'s' if len(answered) > 1 else ''},"
    return f", was shown what {listed(spoke)} said," if spoke else ""


def _is(u: Utterance, right: bool) -> bool:
    return u.grade is not None and u.grade.correct is right


def _by_training(run: Run, to: bool) -> dict[str, Any]:
    """A held-out answer of a run with one turn that was wrong before training and is right after it, or the reverse."""
    title = f"Training {'made an answer right' if to else 'spoiled a right answer'}"
    before = {one.dialogue.example.id: one for one in run.of("before")}
    changes = []
    for one in run.of("after"):
        earlier = before.get(one.dialogue.example.id)
        last = {u.agent: u for turn in graded(earlier.dialogue) for u, _ in turn} if earlier else {}
        for u, grade in (answer for turn in graded(one.dialogue) for answer in turn):
            if u.agent in last and bool(grade.correct) == to and _is(last[u.agent], not to):
                changes.append(Change(one, last[u.agent], u))
    found = _clearest(changes)
    words = ("wrong", "right") if to else ("right", "wrong")
    if found is None:
        asked = len(before.keys() & {one.dialogue.example.id for one in run.of("after")})
        if not asked:
            return _example_of(run, to)
        return _empty(title, f"No {words[0]} answer became {words[1]} on {counted(asked, 'held-out question')}.")
    lines = [_line(found.was, "before training"), _line(found.now, "after training", changed=True)]
    told = f"{found.now.agent} was {words[0]} before training and is {words[1]} after it."
    return _exhibit(title, told, found.one, lines)


def _example_of(run: Run, right: bool) -> dict[str, Any]:
    """A dialogue whose last answer is right, or wrong, where nothing before training is recorded."""
    what = "right" if right else "wrong"
    answers = ((one, *answer) for one in newest(run) for answer in last_answers(one.dialogue))
    found = _clearest(Change(one, u, u) for one, u, grade in answers if grade.correct is right)
    title = f"A {what} answer"
    if found is None:
        return _empty(title, f"No recorded answer is {what}.")
    return _exhibit(title, f"{found.now.agent} is {what}.", found.one, [_line(found.now)])


# -- scores and games -----------------------------------------------------------------------------------------------


def _scored(pool: Sequence[Recorded], several: bool) -> list[dict[str, Any]]:
    """The answers whose scores talking raised and lowered most, or those with the best and the lowest score."""
    changes = []
    for one in pool:
        last: dict[str, Utterance] = {}
        for u in one.dialogue.answers():
            score = finite(u.rewards.get("score"))
            if score is None:
                continue
            earlier = last.get(u.agent)
            if earlier is not None:
                changes.append(Change(one, earlier, u, score - float(earlier.rewards["score"])))
            elif not several:
                changes.append(Change(one, u, u, score))
            last[u.agent] = u
    shown = []
    for better in (True, False):
        pick: Callable[..., Change | None] = max if better else min
        found = pick(changes, key=lambda change: change.size, default=None)
        word = "raised" if better else "lowered"
        title = f"Talking {word} a score" if several else f"The {'best' if better else 'lowest'} score"
        if found is None or (several and (found.size <= 0 if better else found.size >= 0)):
            missing = f"No answer's score was {word} by talking." if several else "No answer has one."
            shown.append(_empty(title, missing))
            continue
        was, now = (f"{float(u.rewards['score']):.3f}" for u in (found.was, found.now))
        turns = found.was.turn + 1, found.now.turn + 1
        told = f"{found.now.agent} earned {now}."
        if several:
            told = f"{found.now.agent} earned {was} in turn {turns[0]} and {now} in turn {turns[1]}."
        shown.append(_exhibit(title, told, found.one, _lines(found)))
    return shown


def _games(run: Run) -> list[dict[str, Any]]:
    """A short game that was played to its end, and one that an illegal move ended."""
    shown = []
    for illegal in (False, True):
        title = "A game that an illegal move ended" if illegal else "A game that was played to its end"
        found = min(
            [one for one in newest(run) if (one.dialogue.outcome == "illegal") == illegal],
            key=lambda one: (len(one.dialogue.utterances), one.number),
            default=None,
        )
        if found is None:
            shown.append(_empty(title, f"None of {counted(len(newest(run)), 'game')} was one."))
        else:
            said = found.dialogue.utterances
            lines = [_line(u) for u in said[-2 * MOST_LINES :]]
            ended = outcome_of(found.dialogue)
            shown.append(_exhibit(title, f"It ended: {ended}." if ended else "", found, lines))
    return shown


# -- as the page reads them -----------------------------------------------------------------------------------------


def _lines(change: Change) -> list[dict[str, Any]]:
    """The utterances of a short dialogue; of a longer one the changed answers and what was shown in between."""
    said = change.one.dialogue.utterances
    wanted = {change.was.id, change.now.id, *change.now.parents}
    chosen = said if len(said) <= MOST_LINES else [u for u in said if u.id in wanted]
    return [_line(u, changed=u.id == change.now.id) for u in chosen]


def _line(u: Utterance, when: str = "", changed: bool = False) -> dict[str, Any]:
    correct = u.grade.correct if u.grade is not None and u.answers else None
    score = finite(u.rewards.get("score"))
    text = visible(u.text)
    return {
        "agent": visible(u.agent),
        "role": visible(u.role) if u.role and u.role != u.agent else None,
        "when": when or f"turn {u.turn + 1}",
        "answer": visible(u.grade.answer)
        if u.grade is not None and u.grade.answer is not None and len(text) > LONG
        else None,
        "text": text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}\u2026",
        "correct": correct,
        "score": None if correct is not None or score is None else f"{score:.3f}",
        "changed": changed,
    }


def _exhibit(title: str, told: str, one: Recorded, lines: list[dict[str, Any]]) -> dict[str, Any]:
    game = game_of(one.dialogue)
    what = "question" if game is None else "game"
    kind = kind_of(one.dialogue) if game is None else None
    of_kind = f" of kind {kind}" if kind else ""
    held_out = f"A held-out {what}{of_kind}, {one.when} training"
    return {
        "title": title,
        "told": visible(told),
        "where": held_out if isinstance(one.when, str) else f"A {what}{of_kind} in training, update {one.when}",
        "question": visible(one.dialogue.example.question or game or ""),
        "label": visible(one.dialogue.example.answer),
        "game": game is not None,
        "lines": lines,
        "more": len(one.dialogue.utterances) - len(lines),
        "key": visible(one.key),
    }


def _empty(title: str, told: str) -> dict[str, Any]:
    return {"title": title, "told": told, "lines": []}
