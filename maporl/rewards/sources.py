"""Reward sources, and how their values become one credit per utterance.

A source is ``(dialogues, task) -> one value per utterance of every dialogue, or None``: None means that it does not
apply. A source that fails raises; nothing here turns a failure into 0.
"""

import math
from collections.abc import Callable

import numpy as np

from maporl.rewards.shaping import share_scores
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance

RewardSource = Callable[[list[Dialogue], Task], list[list[float | None]]]


class RewardFailure(RuntimeError):
    """A reward is missing, not finite, or its source raised; names source, dialogue, agent and turn."""


def label(dialogues: list[Dialogue], task: Task) -> list[list[float | None]]:
    """1 for a right answer, 0 for a wrong one, by the task's grader; every answer's grade is kept on it."""
    values: list[list[float | None]] = []
    for dialogue in dialogues:
        row: list[float | None] = []
        for utterance in dialogue.utterances:
            utterance.grade = task.grade(dialogue.example, utterance.text)
            row.append(None if utterance.grade.correct is None else float(utterance.grade.correct))
        values.append(row)
    return values


SOURCES: dict[str, RewardSource] = {
    "label": label,
}


def score_dialogues(dialogues: list[Dialogue], task: Task, sources: dict[str, float]) -> None:
    """Fill in ``utterance.rewards`` by source name, and ``rewards["score"]``, their weighted sum over those that apply."""
    for utterance in (u for d in dialogues for u in d.utterances):
        utterance.rewards = {}
    for name, weight in sources.items():
        try:
            values = SOURCES[name](dialogues, task)
        except Exception as error:
            raise RewardFailure(
                f"reward source {name!r} failed on task {task.name}: {type(error).__name__}: {error}"
            ) from error
        for dialogue, row in zip(dialogues, values, strict=True):
            for utterance, value in zip(dialogue.utterances, row, strict=True):
                if value is None:
                    continue
                if not math.isfinite(value):
                    raise RewardFailure(f"reward source {name!r} gave {value} to {where(dialogue, utterance)}")
                utterance.rewards[name] = value
                utterance.rewards["score"] = utterance.rewards.get("score", 0.0) + weight * value
    for dialogue in dialogues:
        for utterance in dialogue.utterances:
            if "score" not in utterance.rewards:
                why = utterance.grade.reason if utterance.grade else "no source applies"
                raise RewardFailure(f"no reward source scored {where(dialogue, utterance)}: {why}")


def assign_credit(
    dialogues: list[Dialogue], agents: tuple[str, ...], horizon: str, share: str, discount: float
) -> None:
    """Fill in ``rewards["credit"]``: the score after :func:`maporl.rewards.shaping.share_scores`."""
    turns = max(d.turns() for d in dialogues)
    scores = np.full((turns, len(agents), len(dialogues)), np.nan)
    seat = {agent: index for index, agent in enumerate(agents)}
    for question, dialogue in enumerate(dialogues):
        for u in dialogue.utterances:
            scores[u.turn, seat[u.agent], question] = u.rewards["score"]
    credit = share_scores(scores, horizon, share, discount)
    for question, dialogue in enumerate(dialogues):
        for u in dialogue.utterances:
            u.rewards["credit"] = float(credit[u.turn, seat[u.agent], question])


def where(dialogue: Dialogue, utterance: Utterance) -> str:
    """Names an utterance for people: agent, turn (from 1), dialogue."""
    return f"agent {utterance.agent!r}, turn {utterance.turn + 1}, dialogue {dialogue.example.id}.{dialogue.rollout}"
