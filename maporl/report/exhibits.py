"""Two dialogues for the first screen of a page: one in which talking changed an answer for the better, and one for the
worse.

Of a run with one turn they show what training changed; of a run without labels, which scores talking changed most; and
of games, one that was played to its end and one that was not.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from maporl.report.charts import finite
from maporl.report.counts import counts_of
from maporl.report.dialogues import LAST_UPDATES, game_of, graded, kind_of, last_answers
from maporl.report.findings import said
from maporl.report.read import Recorded, Run
from maporl.text import visible
from maporl.types import Utterance

MOST_LINES, MOST_CHARACTERS = 4, 1500
"""Of a longer dialogue only the lines that matter are shown, and of a longer text its beginning."""
LONG = 80
"""Beside a text of more characters than this stands the answer that was read in it."""
TITLES = {
    "talking": ("Talking spoiled a right answer", "Talking made an answer right"),
    "training": ("Training spoiled a right answer", "Training made an answer right"),
    "answer": ("A wrong answer", "A right answer"),
    "scores": ("Talking lowered a score", "Talking raised a score"),
    "score": ("The lowest score", "The best score"),
    "game": ("A game that an illegal move ended", "A game that was played to its end"),
}


class Shown(NamedTuple):
    """A dialogue that is shown, or none: of what ``kind``, and whether it is the ``better`` of two; an answer in it
    (``now``) and the agent's earlier one; in how many held-out and ``recent`` dialogues one was looked for in vain."""

    kind: str
    better: bool
    one: Any = None
    was: Any = None
    now: Any = None
    asked: int = 0
    recent: int = 0

    @property
    def heard(self) -> list[str]:
        """Who of the others it was shown before it answered again."""
        said = {u.id: u.agent for u in self.one.dialogue.utterances}
        return list(dict.fromkeys(said[p] for p in self.now.parents if said.get(p, self.now.agent) != self.now.agent))


def exhibits(run: Run) -> list[dict[str, Any]]:
    """The two dialogues, or words in place of one that the run does not have. Empty before anything was played."""
    if not run.dialogues:
        return []
    game, pool = counts_of(run).game, counts_of(run).newest or run.dialogues
    several = any(u.turn > 0 for one in pool for u in one.dialogue.answers())
    if not game and not any(graded(one.dialogue) for one in pool):
        return [_drawn(_by_score(pool, several, better)) for better in (True, False)]
    find = _game if game else _by_talking if several else _by_training
    return [_drawn(find(run, better)) for better in (True, False)]


def _by_talking(run: Run, better: bool) -> Shown:
    """An answer that was wrong in an agent's earlier turn and right in its next (``better``), or the reverse."""
    held_out, trained = run.of("after"), [one for one in run.dialogues if isinstance(one.when, int)]
    last = max((one.when for one in trained), default=0)
    recent = [one for one in trained if one.when > last - LAST_UPDATES]  # type: ignore[operator]
    for pool, asked in ((held_out, 0), (recent, len(held_out))):
        if found := _clearest(change for one in pool for change in _changes(one, better)):
            return found._replace(asked=asked)
    return Shown("talking", better, asked=len(held_out), recent=len(recent))


def _changes(one: Recorded, better: bool) -> Iterator[Shown]:
    """The answers of a dialogue that became right (``better``) or wrong from an agent's turn to its next."""
    last: dict[str, tuple[Utterance, bool]] = {}
    for u, grade in (answer for turn in graded(one.dialogue) for answer in turn):
        now = bool(grade.correct)
        was, right = last.get(u.agent, (u, now))
        if now == better and right != now:
            yield Shown("talking", better, one, was, u)
        last[u.agent] = (u, now)


def _clearest(changes: Iterable[Shown]) -> Shown | None:
    """The change that reads best: its agent was shown another answer, nothing changed back, and it is short."""

    def order(change: Shown) -> tuple[bool, bool, int, int]:
        length = sum(len(u.text) for u in change.one.dialogue.utterances)
        back = any(_changes(change.one, not change.better))
        return (not change.now.parents, back, length, change.one.number)

    return min(changes, key=order, default=None)


def _by_training(run: Run, better: bool) -> Shown:
    """A held-out answer of a run with one turn that was wrong before training and is right after it, or the reverse; a
    right or a wrong answer where nothing before training is recorded."""
    before = {one.dialogue.example.id: one for one in run.of("before")}
    pairs = [(before[name], one) for one in run.of("after") if (name := one.dialogue.example.id) in before]
    changes = []
    for earlier, one in pairs:
        last = {u.agent: (u, bool(g.correct)) for turn in graded(earlier.dialogue) for u, g in turn}
        for u, grade in (answer for turn in graded(one.dialogue) for answer in turn):
            if bool(grade.correct) == better and last.get(u.agent, (u, better))[1] != better:
                changes.append(Shown("training", better, one, last[u.agent][0], u))
    if not pairs:
        answers = ((one, *answer) for one in counts_of(run).newest for answer in last_answers(one.dialogue))
        changes = [Shown("answer", better, one, u, u) for one, u, grade in answers if grade.correct is better]
    return _clearest(changes) or Shown("training" if pairs else "answer", better, asked=len(pairs))


def _by_score(pool: list[Recorded], several: bool, better: bool) -> Shown:
    """The answer whose score talking raised most (``better``) or lowered most, or the best or lowest score."""
    kind, changes, sign = "scores" if several else "score", [], 1 if better else -1
    for one in pool:
        last: dict[str, Utterance] = {}
        for u in one.dialogue.answers():
            if (score := finite(u.rewards.get("score"))) is not None:
                was = last.get(u.agent)
                if was is not None or not several:
                    size = sign * (score - (was.rewards["score"] if was is not None and several else 0.0))
                    changes.append((size, Shown(kind, better, one, was or u, u)))
                last[u.agent] = u
    size, found = max(changes, key=lambda change: change[0], default=(0.0, None))
    return Shown(kind, better) if found is None or (several and size <= 0) else found


def _game(run: Run, better: bool) -> Shown:
    """A short game that was played to its end (``better``), or one that an illegal move ended."""
    found = [one for one in counts_of(run).newest if (one.dialogue.outcome != "illegal") == better]
    short = min(found, key=lambda one: (len(one.dialogue.utterances), one.number), default=None)
    return Shown("game", better, short, asked=len(counts_of(run).newest))


def _drawn(shown: Shown) -> dict[str, Any]:
    """A dialogue as the page reads it."""
    drawn = {"title": TITLES[shown.kind][shown.better], "told": said("dialogue", shown), "lines": []}
    if (one := shown.one) is None:
        return drawn
    dialogue, game = one.dialogue, game_of(one.dialogue)
    what, kind = "question" if game is None else "game", kind_of(dialogue) if game is None else None
    of_kind = f"{what} of kind {kind}" if kind else what
    where = (f"A held-out {of_kind}, {one.when} training", f"A {of_kind} in training, update {one.when}")
    lines = _lines(shown, dialogue.utterances)
    return {
        **drawn,
        "where": where[isinstance(one.when, int)],
        "question": visible(dialogue.example.question or game or ""),
        "label": visible(dialogue.example.answer),
        "game": game is not None,
        "lines": lines,
        "more": len(dialogue.utterances) - len(lines),
        "key": visible(one.key),
    }


def _lines(shown: Shown, said: list[Utterance]) -> list[dict[str, Any]]:
    """The utterances of a short dialogue; of a longer one the changed answers and what was shown in between."""
    if shown.kind == "training":
        return [_line(shown.was, "before training"), _line(shown.now, "after training", True)]
    if shown.kind == "answer":
        return [_line(shown.now)]
    if shown.kind == "game":
        return [_line(u) for u in said[-2 * MOST_LINES :]]
    wanted = {shown.was.id, shown.now.id, *shown.now.parents}
    return [_line(u, changed=u is shown.now) for u in said if len(said) <= MOST_LINES or u.id in wanted]


def _line(u: Utterance, when: str = "", changed: bool = False) -> dict[str, Any]:
    correct = u.grade.correct if u.grade is not None and u.answers else None
    answer = u.grade.answer if u.grade is not None else None
    score, text = finite(u.rewards.get("score")), visible(u.text)
    return {
        "agent": visible(u.agent),
        "role": visible(u.role) if u.role and u.role != u.agent else None,
        "when": when or f"turn {u.turn + 1}",
        "answer": visible(answer) if answer is not None and len(text) > LONG else None,
        "text": text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}\u2026",
        "correct": correct,
        "score": None if correct is not None or score is None else f"{score:.3f}",
        "changed": changed,
    }
