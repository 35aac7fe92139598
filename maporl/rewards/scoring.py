"""Grades and scores dialogues: sources give named rewards, and their weighted sum is the score. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import replace

from maporl.rewards.base import RewardFailure, RewardSource, where
from maporl.tasks.base import Task
from maporl.types import Dialogue


def grade_answers(dialogues: list[Dialogue], task: Task) -> None:
    """Set ``grade`` of all answers that have no grade yet.

    Raises:
        RewardFailure: the grader of the task raised an error.
    """
    asked = [(d, u) for d in dialogues for u in d.answers() if u.grade is None]
    try:
        grades = task.grade_many([d.example for d, _ in asked], [u.words() for _, u in asked])
    except Exception as error:
        first = f"{where(*asked[0])} or another of {len(asked)} answers"
        raise RewardFailure(f"task {task.name}: grading {first} failed: {type(error).__name__}: {error}") from error
    for (_, utterance), grade in zip(asked, grades, strict=True):
        utterance.grade = grade


def fill_in(dialogues: list[Dialogue], task: Task, sources: Mapping[str, RewardSource]) -> None:
    """Set ``rewards[name]`` for each of the ``sources`` and for each answer that lacks it.

    Raises:
        RewardFailure: a source raised an error, or gave the wrong number of values or a value that is not finite.
    """
    for name, source in sources.items():
        lacking = [replace(d, utterances=[u for u in d.answers() if name not in u.rewards]) for d in dialogues]
        lacking = [d for d in lacking if d.utterances]
        try:
            values = source(lacking, task) if lacking else []
        except RewardFailure:
            raise
        except Exception as error:
            raise RewardFailure(
                f"reward source {name!r} failed on task {task.name}: {type(error).__name__}: {error}"
            ) from error
        if [len(row) for row in values] != [len(d.utterances) for d in lacking]:
            raise RewardFailure(
                f"reward source {name!r}: expected one value for each of the {sum(len(d.utterances) for d in lacking)} "
                f"answers of {len(lacking)} dialogues, got {sum(map(len, values))} for {len(values)}"
            )
        for dialogue, row in zip(lacking, values, strict=True):
            for utterance, value in zip(dialogue.utterances, row, strict=True):
                if value is None:
                    continue
                if not math.isfinite(value):
                    raise RewardFailure(f"reward source {name!r} gave {value} to {where(dialogue, utterance)}")
                utterance.rewards[name] = value


def score_dialogues(
    dialogues: list[Dialogue], task: Task, sources: Mapping[str, RewardSource], weights: Mapping[str, float]
) -> None:
    """Set ``rewards["score"]`` to the weighted sum of the rewards that an utterance has.

    ``sources`` score the answers first. A name in ``weights`` without a source is a reward that the protocol has paid;
    the protocol may pay it to any utterance.

    Raises:
        RewardFailure: a source failed, or an answer has none of these rewards.
    """
    fill_in(dialogues, task, {name: sources[name] for name in weights if name in sources})
    for dialogue in dialogues:
        for u in dialogue.utterances:
            values = [weight * u.rewards[name] for name, weight in weights.items() if name in u.rewards]
            if values:
                u.rewards["score"] = sum(values)
            elif u.answers:
                why = u.grade.reason if u.grade else "no source applies"
                raise RewardFailure(f"no reward source scored {where(dialogue, u)}: {why}")
