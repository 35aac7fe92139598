"""What agents know without the others, and when they take over what others say."""

from typing import Any

from maporl.report.dialogues import graded, kind_of
from maporl.report.read import Recorded, Run
from maporl.types import Dialogue

MOST_KINDS = 4
"""With more kinds of questions than this, a row cannot show what an agent knows of each."""
Cases = dict[str, list[bool]]
"""For each agent, whether each of its answers was right."""


def known(run: Run) -> list[tuple[str, list[tuple[str, list[bool]]]]]:
    """For each agent, whether its answers of the first turn after training are right, by kind of question. Empty for
    one kind, and where agents hear others in the first turn.
    """
    if not speak_first_alone(run.of("after")):
        return []
    right: dict[str, dict[str, list[bool]]] = {}
    for one in run.of("after"):
        kind = kind_of(one.dialogue)
        for turn in graded(one.dialogue)[:1]:
            for u, grade in turn:
                right.setdefault(u.agent, {}).setdefault(kind or "", []).append(bool(grade.correct))
    kinds = {kind for by_kind in right.values() for kind in by_kind}
    if not 1 < len(kinds) <= MOST_KINDS or "" in kinds:
        return []
    return [(agent, sorted(by_kind.items())) for agent, by_kind in right.items()]


def knowledge_table(run: Run) -> dict[str, Any] | None:
    """Which kinds of questions each agent answers by itself, as a table."""
    found = known(run)
    kinds = sorted({kind for _, own in found for kind, _ in own})
    if not found:
        return None
    return {
        "title": "Who knows what?",
        "about": "Share of first answers that are right, before agents hear each other, by the kind of the question. "
        "Held-out questions, after training.",
        "columns": ["agent", *kinds],
        "rows": [[a, *(_share(dict(own)[k]) if k in dict(own) else "\u2013" for k in kinds)] for a, own in found],
    }


def speak_first_alone(dialogues: list[Recorded]) -> bool:
    """Whether all graded answers of the first turn were given before their agents heard anybody."""
    return not any(u.parents for one in dialogues for turn in graded(one.dialogue)[:1] for u, _ in turn)


def listening_table(run: Run) -> dict[str, Any] | None:
    """How often each agent is right at last where another one was, and where it was right and another was not."""
    after, before = _cases(run.of("after")), _cases(run.of("before"))
    states = ("wrong, shown a right answer", "right, shown a wrong answer")
    rows = []
    for agent in sorted(after[0] | after[1]):
        for state, now, was in zip(states, after, before, strict=True):
            if own := now.get(agent):
                earlier = _share(was[agent]) if was.get(agent) else "\u2013"
                rows.append([agent, state, str(len(own)), earlier, _share(own)])
    if not rows:
        return None
    return {
        "title": "When do they listen?",
        "about": "How often the next answer is right of an agent that was wrong and was shown a right answer, and of "
        "one that was right and was shown a wrong one. Held-out questions; the cases are those after training.",
        "columns": ["agent", "it was", "cases", "then right, before training", "then right, after training"],
        "rows": rows,
    }


def _share(right: list[bool]) -> str:
    return f"{sum(right) / len(right):.1%}"


def _cases(dialogues: list[Recorded]) -> tuple[Cases, Cases]:
    """Whether the next answers are right, of the wrong who heard a right answer and the right who heard a wrong one."""
    learns: Cases = {}
    keeps: Cases = {}
    for one in dialogues:
        for agent, was, heard, now in _answers_again(one.dialogue):
            if not was and any(heard):
                learns.setdefault(agent, []).append(now)
            if was and not all(heard):
                keeps.setdefault(agent, []).append(now)
    return learns, keeps


def _answers_again(dialogue: Dialogue) -> list[tuple[str, bool, list[bool], bool]]:
    """For each answer after an agent's first: the agent, and if its last one, those it heard and this are right."""
    answers = [(u, bool(grade.correct)) for turn in graded(dialogue) for u, grade in turn]
    right = {u.id: correct for u, correct in answers}
    by_turn = {(u.agent, u.turn): correct for u, correct in answers}
    speaker = {u.id: u.agent for u, _ in answers}
    again = []
    for u, correct in answers:
        # the agent may have been silent in the turn before
        before = max((v.turn for v in dialogue.utterances if v.agent == u.agent and v.turn < u.turn), default=-1)
        if (u.agent, before) in by_turn:
            heard = [right[p] for p in u.parents if speaker.get(p, u.agent) != u.agent]
            again.append((u.agent, by_turn[u.agent, before], heard, correct))
    return again
