"""Dialogues as the report's page shows them: with short keys, visible text, and the flags that one can filter by."""

import json
import math
from collections.abc import Sequence
from typing import Any

from maporl.evaluation.metrics import unanswered
from maporl.report.charts import finite
from maporl.report.language import counted
from maporl.report.read import Recorded, Run, When
from maporl.text import LONGEST, visible
from maporl.types import Call, Dialogue, Grade, Stop, Trace, TurnEnd, Utterance, is_program

MOST = 5000
"""The most dialogues that a report shows. Of a longer run it shows the last evaluation, the last updates, and an even
selection of the others."""
TOKENS = 100_000
"""The most tokens that a page shows with their numbers.

With more tokens, they are those of dialogues spread evenly over the run.
"""
LAST_UPDATES = 10
"""The updates that stand for what the team can do now, in a run without an evaluation at its end."""
FLAGS = {
    "corrected": "an agent went from wrong to right",
    "spoiled": "an agent went from right to wrong",
    "disagreed": "the last answers differ",
    "penalised": "a penalty was given",
    "all right": "every last answer is right",
    "mixed": "some last answers are right, some wrong",
    "all wrong": "every last answer is wrong",
    "unreadable": "no answer could be read from a text that was graded",
    "unanswered": "it ended although nobody had answered the question",
    "cut off": "an answer was cut off at the length limit",
    "illegal": "an illegal move ended the game",
    "called": "an agent called a tool",
    "no call": "agents could call tools, and nobody did",
    "call failed": "a call of a tool failed",
    "call unread": "a call of a tool could not be read",
    "no calls left": "an agent had no calls left",
    "lost": "an environment did not answer in time, or a program failed",
    "program failed": "the program ended without an answer",
    "refused": "a request of the program was refused",
    "history changed": "a request of the program repeats a conversation in another form, so that a new one began",
}
KINDS = ("task", "skill", "subject", "type", "category", "level", "game", "source")
Graded = tuple[Utterance, Grade]
"""An answer that is graded right or wrong, and its grade."""
UNGRADED = ("disagreed", "all right", "mixed", "all wrong", "corrected", "spoiled", "unreadable")
"""Flags that say nothing about a game, in which players answer different questions."""


def newest(run: Run) -> list[Recorded]:
    """The dialogues that show what the team can do now: those of the evaluation after training, else of the last
    updates."""
    after = run.of("after")
    steps = [one.when for one in run.dialogues if isinstance(one.when, int)]
    first = max(steps, default=0) - LAST_UPDATES + 1
    return after or [one for one in run.dialogues if isinstance(one.when, int) and one.when >= first]


def entries(run: Run, number: int = 0, most: int = MOST) -> list[dict[str, Any]]:
    """The dialogues of run ``number`` of a page: evaluations first, then updates from the last to the first."""
    order: dict[When, int] = {"after": 0, "before": 1}
    chosen = sorted(run.dialogues, key=lambda d: (order.get(d.when, 2), -d.when if isinstance(d.when, int) else 0))
    now = set(newest(run))
    others = [one for one in chosen if one not in now]
    room = max(0, most - len(now))
    if len(others) > room:
        others = [others[i * len(others) // room] for i in range(room)]
    picked = now | set(others)
    return shown([one for one in chosen if one in picked][:most], number)


def shown(dialogues: Sequence[Recorded], number: int = 0) -> list[dict[str, Any]]:
    """The entries of ``dialogues``; at most :data:`TOKENS` tokens have their numbers."""
    tokens = [sum(len(u.trace.pieces) for u in one.dialogue.utterances if u.trace is not None) for one in dialogues]
    share = min(1.0, TOKENS / max(1, sum(tokens)))
    records, owed = [], 0.0
    for one, count in zip(dialogues, tokens, strict=True):
        owed += share * count
        traced = owed >= count
        owed -= count if traced else 0
        records.append(entry(one, number, traced))
    return records


def entry(one: Recorded, number: int = 0, traced: bool = True) -> dict[str, Any]:
    """One dialogue as the page reads it. Its ``key`` is the same in every report of the run. With ``traced`` it has the
    numbers of its tokens."""
    dialogue, game = one.dialogue, game_of(one.dialogue)
    example = dialogue.example
    return {
        "run": number,
        "key": f"{number}/{visible(one.key)}",
        "when": one.when,
        "id": visible(example.id),
        "question": visible(example.question) or (f"{game}: {_state(dialogue)}" if game else ""),
        "label": visible(example.answer),
        "kind": kind_of(dialogue),
        "game": game is not None,
        "outcome": outcome_of(dialogue),
        "flags": flags_of(dialogue),
        "said": [_utterance(u, traced) | {"credited": credited(u, dialogue.utterances)} for u in dialogue.utterances],
    }


def game_of(dialogue: Dialogue) -> str | None:
    """The name of the game that was played; None where the dialogue is not a game."""
    return next((visible(u.tags["game"]) for u in dialogue.utterances if "game" in u.tags), None)


def _state(dialogue: Dialogue) -> str:
    """The states that the players saw, one after the other."""
    return " | ".join(visible(u.tags.get("state")) for u in dialogue.utterances if u.tags)


def outcome_of(dialogue: Dialogue) -> str | None:
    """How the dialogue ended, in words: what each player was paid, where it was a game."""
    outcome = dialogue.outcome
    if is_program(dialogue):
        failure = outcome.get("failure")
        refused = [f"refused: {why}" for why in outcome.get("refused", ())]
        ended = f"failed: {failure.splitlines()[-1]}" if failure else f"returned {outcome['answer']!r}"
        return visible("; ".join([f"the program {ended} after {outcome['calls']} calls", *refused]))
    if isinstance(outcome, dict):
        return ", ".join(f"{visible(agent)} {paid:+g}" for agent, paid in outcome.items() if finite(paid) is not None)
    return None if outcome is None else visible(outcome)


def kind_of(dialogue: Dialogue) -> str | None:
    """What kind of question it is: the task, the subject, the level or whatever of :data:`KINDS` the example names."""
    tags: dict[str, Any] = next((u.tags for u in dialogue.utterances if u.tags), {})
    for name in KINDS:
        value = dialogue.example.meta.get(name, tags.get(name))
        if isinstance(value, str | int) and str(value):
            return visible(value)
    return None


def graded(dialogue: Dialogue) -> list[list[Graded]]:
    """The graded answers of each turn, without turns that have none."""
    turns: dict[int, list[Graded]] = {}
    for u in dialogue.answers():
        if u.grade is not None and u.grade.correct is not None:
            turns.setdefault(u.turn, []).append((u, u.grade))
    return [turns[t] for t in sorted(turns)]


def last_answers(dialogue: Dialogue) -> list[Graded]:
    """The graded answers of the last turn; in a game each player's own last move."""
    turns = graded(dialogue)
    if game_of(dialogue) is not None:
        return list({u.agent: (u, grade) for turn in turns for u, grade in turn}.values())
    return turns[-1] if turns else []


def right_share(dialogue: Dialogue) -> float:
    """The share of the last turn's graded answers that are right."""
    answers = graded(dialogue)[-1]
    return sum(bool(grade.correct) for _, grade in answers) / len(answers)


def flags_of(dialogue: Dialogue) -> list[str]:
    """The :data:`FLAGS` that hold for a dialogue."""
    flags = set()
    right: dict[str, bool] = {}
    for u, grade in (answer for turn in graded(dialogue) for answer in turn):
        now, before = bool(grade.correct), right.get(u.agent)
        if before is not None and before != now:
            flags.add("corrected" if now else "spoiled")
        right[u.agent] = now
    grades = [grade for _, grade in last_answers(dialogue)]
    if grades:
        share = sum(bool(g.correct) for g in grades)
        flags.add("all right" if share == len(grades) else "mixed" if share else "all wrong")
        if len({g.answer for g in grades}) > 1:
            flags.add("disagreed")
    flags |= {"unanswered"} if unanswered(dialogue) else set()
    for u in dialogue.utterances:
        if any(value and (n.startswith("penalty/") or n == "missing_eos") for n, value in u.rewards.items()):
            flags.add("penalised")
        if u.answers and u.grade is not None and u.grade.correct is not None and u.grade.answer is None:
            flags.add("unreadable")
        if u.stop == Stop.LENGTH:
            flags.add("cut off")
        errors = [call.result.error for call in u.calls if call.result is not None]
        flags |= {"called"} if u.calls else set()
        flags |= {"call failed"} if any(errors) else set()
        flags |= {"call unread"} if "unread" in errors else set()
        flags |= {"no calls left"} if u.turn_end is TurnEnd.LIMIT else set()
    if "called" not in flags and any(u.turn_end is not None for u in dialogue.utterances):
        flags.add("no call")
    flags |= {"lost"} if dialogue.lost else set()
    if is_program(dialogue):
        flags |= {"program failed"} if dialogue.outcome.get("failure") else set()
        flags |= {"refused"} if dialogue.outcome.get("refused") else set()
        changed = any(str(u.tags.get("history", "")).startswith("changed") for u in dialogue.utterances)
        flags |= {"history changed"} if changed else set()
    if game_of(dialogue) is not None:
        flags -= set(UNGRADED)
        flags |= {"illegal"} if dialogue.outcome == "illegal" else set()
    return [name for name in FLAGS if name in flags]


LEAST_PART = 0.005
"""The share of a credit below which a part of it is rounding."""


def _utterance(u: Utterance, traced: bool) -> dict[str, Any]:
    grade = u.grade or Grade(None, None, "")
    return {
        "agent": visible(u.agent),
        "role": visible(u.role) or None,
        "turn": u.turn + 1,
        "text": visible(u.text),
        "restated": None if u.restated is None else visible(u.restated),
        "notes": _notes(u),
        "answer": None if grade.answer is None else visible(grade.answer),
        "correct": grade.correct,
        "reason": visible(grade.reason),
        "rewards": {visible(name): finite(value) for name, value in u.rewards.items()},
        "stop": u.stop.value,
        "calls": [_call(call) for call in u.calls],
        "heard": [[visible(m.get("role")), visible(m.get("content"))] for m in u.messages],
        "trace": _trace(u.trace) if traced and u.trace is not None and len(u.text) <= LONGEST else None,
        "compared": compared_with(u),
    }


def credited(u: Utterance, said: Sequence[Utterance]) -> str | None:
    """Where an utterance's credit came from, in a sentence. None where it is not recorded."""
    credit = u.rewards.get("credit")
    if u.trace is None or credit is None or finite(credit) is None:
        return None
    speakers = {v.id: "its own score" if v is u else f"{v.agent}'s score in turn {v.turn + 1}" for v in said}
    parts = [f"{part:.2f} from {speakers[number]}" for number, part in u.trace.earned if number in speakers]
    rest = credit - sum(part for _, part in u.trace.earned)
    for name, value in u.rewards.items():
        kind, _, what = name.partition("/")
        if finite(value) is None:  # a damaged record
            continue
        told = {
            "bonus": f"{value:+.2f} bonus",
            "penalty": f"fined {-value:g} ({what.replace('_', ' ')})",
            "charge": f"charged {-value:.2f} for {what}",
            "missing_eos": f"fined {-value:g} (no end)",
        }
        if kind in told and value:
            parts.append(told[kind])
            rest -= value
    if not parts:
        return None
    if abs(rest) > LEAST_PART * max(1.0, abs(credit)):
        parts.append(f"{rest:+.2f} by the rules")
    return visible(f"Credit {credit:.2f}: {', '.join(parts)}.")


_COLUMNS = {
    "prompt": "the same question",
    "rollout": "the same play of a question",
    "parent": "the same utterance before",
    "action": "the same answer or move",
    "caller": "the same caller",
    "state": "the same state",
    "seed": "the same seed",
}
"""The columns of a key whose values say nothing to a person, in words."""


def compared_with(u: Utterance) -> str | None:
    """Which utterances of its update an utterance was compared with, in a sentence. None where it is not recorded."""
    group = u.trace.compared if u.trace is not None else None
    if group is None:
        return None
    said = [
        _COLUMNS.get(name) or f"{name} {value + 1 if name in ('turn', 'order') and isinstance(value, int) else value}"
        for name, value in group["key"].items()
    ]
    questions = counted(group["questions"], "question")
    what = {
        "baseline": f"whose credits are compared (baseline {group['name']})",
        "scale": f"whose advantages are scaled together (scale {group['name']})",
    }[group["by"]]
    in_common = f" ({', '.join(said)})" if said else ""
    those = f"{counted(group['utterances'], 'utterance')} on {questions} of this update"
    return visible(f"One of {those}{in_common}, {what}. Their mean credit is {group['credit']:.3f}.")


def _notes(u: Utterance) -> list[str]:
    """What a program made of the utterance, and of its request."""
    history, refused = u.tags.get("history"), u.tags.get("refused")
    notes = [] if u.submitted is None else [f"submitted: {u.submitted}" if u.submitted else "nothing was submitted"]
    notes += [f"history {history}"] if isinstance(history, str) and history.startswith("changed") else []
    notes += [f"refused: {refused}"] if isinstance(refused, str) else []
    return [visible(note) for note in notes]


def _call(call: Call) -> dict[str, Any]:
    """A call as one line, ``add(a=2, b=3)``, and what it returned."""
    result = call.result
    arguments = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in dict(call.arguments).items()
    )
    where = "" if call.place is None else f"{call.place}."
    return {
        "line": visible(f"{where}{call.name}({arguments})" if call.name else "a call that could not be read"),
        "result": None if result is None else visible(result.text),
        "error": None if result is None else result.error,
        "reward": None if result is None or result.reward is None else finite(result.reward),
        "seconds": None if result is None else result.seconds,
        "left_out": 0 if result is None else result.left_out,
    }


def _trace(trace: Trace) -> dict[str, Any]:
    return {
        "pieces": [visible(piece) for piece in trace.pieces],
        "logprobs": _finite(trace.logprobs),
        "advantages": _finite(trace.advantages),
        "values": None if trace.values is None else _finite(trace.values),
    }


def _finite(numbers: list[float]) -> list[float | None] | list[float]:
    if all(isinstance(x, float) and math.isfinite(x) for x in numbers):
        return numbers
    return [finite(x) for x in numbers]
