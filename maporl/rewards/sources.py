"""Reward sources: named values for answers.

A source is ``(dialogues, task) -> one value per utterance of every dialogue, or None``: None means that it does not
apply. A source that fails raises; nothing here turns a failure into 0.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from maporl.config import ConfigError
from maporl.grading.numbers import number
from maporl.sections import RewardSection
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance

RewardSource = Callable[[list[Dialogue], Task], list[list[float | None]]]


class RewardFailure(RuntimeError):
    """A reward is missing, not finite, or its source raised; names source, dialogue, agent and turn."""


def label(dialogues: list[Dialogue], task: Task) -> list[list[float | None]]:
    """1 for a right answer, 0 for a wrong one, by the task's grader; every answer's grade is kept on it."""
    grade_answers(dialogues, task)
    return [
        [None if u.grade is None or u.grade.correct is None else float(u.grade.correct) for u in d.utterances]
        for d in dialogues
    ]


def readable(dialogues: list[Dialogue], task: Task) -> list[list[float | None]]:
    """1 for an answer in the asked form, right or wrong, 0 for one in which none could be found."""
    grade_answers(dialogues, task)
    return [[None if u.grade is None else float(u.grade.answer is not None) for u in d.utterances] for d in dialogues]


def near(dialogues: list[Dialogue], task: Task) -> list[list[float | None]]:
    """How near a numeric answer is to the label, in [0, 1]: ``1 / (1 + |a - b| / max(1, |b|))``; 0 where it is no number."""
    grade_answers(dialogues, task)

    def nearness(answer: str | None, truth: str) -> float:
        said, label = (None if text is None else number(text) for text in (answer, truth))
        if said is None or label is None:
            return 0.0
        return float(1 / (1 + abs(said - label) / max(Fraction(1), abs(label))))

    return [[nearness(u.grade.answer if u.grade else None, d.example.answer) for u in d.utterances] for d in dialogues]


def verifier(section: RewardSection, speak: Any) -> RewardSource:
    """A learned verifier's probability that an answer is right, in [0, 1]; see :mod:`maporl.rewards.verifier`."""
    from maporl.rewards.verifier import load_verifier  # needs torch

    if section.verifier is None:
        raise ConfigError("reward.verifier: the source 'verifier' needs it; give it a model, or use the source 'label'")
    return load_verifier(section.verifier)


def judge(section: RewardSection, speak: Any) -> RewardSource:
    """A score by an agent of the team."""
    from maporl.rewards.judges import PointwiseJudge

    if section.judge is None:
        raise ConfigError("reward.judge: the source 'judge' needs it; give it an agent, or use another source")
    return PointwiseJudge(section.judge, speak)


def arena(section: RewardSection, speak: Any) -> RewardSource:
    """A rank among a question's dialogues, by an agent of the team that compares two."""
    from maporl.rewards.judges import PairwiseJudge

    if section.arena is None:
        raise ConfigError("reward.arena: the source 'arena' needs it; give it an agent, or use another source")
    return PairwiseJudge(section.arena, speak)


SOURCES: dict[str, Callable[[RewardSection, Any], RewardSource]] = {
    "label": lambda section, speak: label,
    "format": lambda section, speak: readable,
    "near": lambda section, speak: near,
    "verifier": verifier,
    "judge": judge,
    "arena": arena,
}


def build_sources(section: RewardSection, names: Collection[str], speak: Any = None) -> dict[str, RewardSource]:
    """The sources called ``names``, ready to score; ``speak`` lets agents of the team judge (``maporl.rewards.judges``)."""
    return {name: SOURCES[name](section, speak) for name in names}


def grade_answers(dialogues: list[Dialogue], task: Task) -> None:
    """Fill in ``grade`` of the answers that have none yet."""
    asked = [(d, u) for d in dialogues for u in d.answers() if u.grade is None]
    try:
        grades = task.grade_many([d.example for d, _ in asked], [u.words() for _, u in asked])
    except Exception as error:
        first = f"{where(*asked[0])} or another of {len(asked)} answers"
        raise RewardFailure(f"task {task.name}: grading {first} failed: {type(error).__name__}: {error}") from error
    for (_, utterance), grade in zip(asked, grades, strict=True):
        utterance.grade = grade


def fill_in(dialogues: list[Dialogue], task: Task, sources: Mapping[str, RewardSource]) -> None:
    """Fill in ``rewards[name]`` for each of the ``sources`` and each answer that lacks it."""
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
    """Fill in ``rewards["score"]``: the sum of the rewards that apply, by ``weights``.

    ``sources`` score answers; names without a source are rewards that the protocol has paid, to whatever utterance. An
    answer that nothing scores is an error.
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


def where(dialogue: Dialogue, utterance: Utterance) -> str:
    """Names an utterance for people: agent, turn (from 1), dialogue."""
    return f"agent {utterance.agent!r}, turn {utterance.turn + 1}, dialogue {dialogue.example.id}.{dialogue.rollout}"
