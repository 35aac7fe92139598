"""Grades and scores dialogues: sources give named rewards, and their weighted sum is the score. Imports no torch.

:class:`Scorer` is everything that a trainer or a player needs of rewards, as one part. Then come their statistics.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from maporl.config.imports import told
from maporl.config.schema import RewardSection
from maporl.rewards.base import FunctionSource, RewardFailure, RewardSource, as_source, where
from maporl.rewards.counterfactual import set_contributions
from maporl.rewards.credit import assign_credit
from maporl.rounding import differ
from maporl.tasks.base import Task
from maporl.types import Dialogue, Grade
from trl_ext.copies import is_users, own_copy

logger = logging.getLogger(__name__)


class Scorer:
    """Grades and scores dialogues, and credits utterances.

    Args:
        reward: the weights of the sources, and the rules by which scores become credit.
        sources: reward sources by name.
        speakers: the agents that play, in order.
        digits: for each policy, the token ids that may repeat without penalty.
        missing_eos_penalty: subtracted from the credit of an utterance without end of sequence; None: nothing is.
    """

    def __init__(
        self,
        reward: RewardSection,
        sources: Mapping[str, RewardSource],
        speakers: Sequence[str],
        digits: Mapping[str, Collection[int]] | None = None,
        missing_eos_penalty: float | None = None,
    ):
        self.reward, self.sources, self.speakers = reward, dict(sources), tuple(speakers)
        self.digits, self.missing_eos_penalty = digits or {}, missing_eos_penalty

    @property
    def meeting(self) -> dict[str, RewardSource]:
        """The sources by name whose values depend on what all processes play in an update."""
        return {name: one for name, one in self.sources.items() if type(one).meet is not RewardSource.meet}

    def meet(self, dialogues: list[Dialogue]) -> None:
        """Let the sources of all processes exchange what an update's rewards depend on. All processes call this
        together.

        What these sources have scored before is dropped, because other dialogues may have stood beside it.
        """
        for name, source in self.meeting.items():
            for utterance in (u for dialogue in dialogues for u in dialogue.utterances):
                utterance.rewards.pop(name, None)
            source.meet(handed_out(source, dialogues))

    def grade(self, dialogues: list[Dialogue], task: Task) -> None:
        """Set ``grade`` of every answer that has no grade yet.

        Raises:
            RewardFailure: the task's grader failed.
        """
        grade_answers(dialogues, task)

    def fill_in(self, dialogues: list[Dialogue], task: Task, names: Collection[str]) -> None:
        """Set the rewards called ``names`` of every utterance that lacks them and that their sources score.

        Raises:
            RewardFailure: a source failed.
        """
        fill_in(dialogues, task, {name: self.sources[name] for name in names})

    def score(self, dialogues: list[Dialogue], task: Task) -> None:
        """Grade every answer, and set ``rewards["score"]`` of the utterances to the weighted sum of their sources.

        Ablations are scored too, and what each agent contributed is set
        (:func:`maporl.rewards.counterfactual.set_contributions`).

        Raises:
            RewardFailure: a source failed, or nothing scored an answer.
            ConfigError: nobody answered in an ablation.
        """
        ablations = [ablation for dialogue in dialogues for ablation in dialogue.ablations]
        played = [*dialogues, *ablations]
        grade_answers(played, task)
        score_dialogues(played, task, self.sources, self.reward.sources)
        if ablations:
            set_contributions(dialogues)

    def measure(self, dialogues: list[Dialogue], task: Task) -> None:
        """Grade the dialogues of an evaluation, and score them by what training pays.

        ``unscored`` of the dialogues names the sources that are left out of these scores: those whose values would mean
        something else here or cost what an evaluation should not (:func:`why_not_measured`) and, on a task with labels,
        those that fail. Nothing is left out that has no part in the score.

        Raises:
            RewardFailure: the grader failed, or a source where nothing but rewards tells answers apart.
        """
        self.grade(dialogues, task)
        weights = {name: w for name, w in self.reward.sources.items() if w or not task.labelled}
        asked = [name for name in weights if name in self.sources]
        unscored = {name: why for name in asked if (why := why_not_measured(self.sources[name], task))}
        for name in (name for name in asked if name not in unscored):
            try:
                self.fill_in(dialogues, task, [name])
            except RewardFailure as error:
                if not task.labelled:
                    raise
                unscored[name] = f"it failed: {error}"
                logger.warning("the score of this evaluation is without %s, because %s", name, unscored[name])
        paid = {name: w for name, w in weights.items() if name not in unscored}
        weighted_scores(dialogues, paid, needed=not task.labelled and not unscored)
        for dialogue in dialogues:
            dialogue.unscored = unscored

    def worth(self, dialogues: list[Dialogue], task: Task) -> list[float]:
        """Return the sum of the scores of each dialogue's utterances. Each dialogue is judged separately.

        Raises:
            RewardFailure: a source failed, or nothing scored an answer.
        """
        self.score(dialogues, task)
        return [sum(u.rewards.get("score", 0.0) for u in dialogue.utterances) for dialogue in dialogues]

    def credit(self, dialogues: list[Dialogue], task: Task, update: int = 1) -> None:
        """Score the utterances and set their credits (``rewards["credit"]``) in ``update``, including penalties.

        Raises:
            RewardFailure: a source failed, or nothing scored an answer.
        """
        self.score(dialogues, task)
        fill_in(dialogues, task, {name: self.sources[name] for name in self.reward.charges if name in self.sources})
        assign_credit(dialogues, self.speakers, self.reward, self.digits, update)
        if self.missing_eos_penalty is None:
            return
        credited = (u for d in dialogues for u in d.utterances if "credit" in u.rewards)
        for utterance in (u for u in credited if not u.stop.whole):
            utterance.rewards["missing_eos"] = -self.missing_eos_penalty
            utterance.rewards["credit"] -= self.missing_eos_penalty


def grade_answers(dialogues: list[Dialogue], task: Task) -> None:
    """Set ``grade`` of all answers that have no grade yet.

    Raises:
        RewardFailure: the grader of the task raised an error.
    """
    asked = [(d, u) for d in dialogues for u in d.answers() if u.grade is None]
    for _, utterance in asked:
        if utterance.is_thought and utterance.restated is None:
            utterance.grade = Grade(None, False, "its thought does not end")
    asked = [(d, u) for d, u in asked if u.grade is None]
    try:
        grades = task.grade_many([d.asked(u) for d, u in asked], [u.words() for _, u in asked])
    except Exception as error:
        first = f"{where(*asked[0])} or another of {len(asked)} answers"
        raise RewardFailure(f"task {task.name}: grading {first} failed: {told(error)}") from error
    if len(grades) != len(asked) or (strange := [g for g in grades if not isinstance(g, Grade)]):
        got = f"{len(grades)} grades" if len(grades) != len(asked) else f"{strange[0]!r:.80}"
        raise RewardFailure(f"task {task.name}: expected a maporl.Grade for each of {len(asked)} answers, got {got}")
    for (_, utterance), grade in zip(asked, grades, strict=True):
        utterance.grade = grade


def fill_in(dialogues: list[Dialogue], task: Task, sources: Mapping[str, RewardSource]) -> None:
    """Set ``rewards[name]`` for each of the ``sources``, where it is missing and the source has a value.

    A source that is ``answers_only`` is shown only the answers that lack the reward. Any other source is shown whole
    dialogues, because what a plan is worth may depend on what others made of it. A plain function is such a source.

    Raises:
        RewardFailure: a source raised an error, or gave the wrong number of values or a value that is not finite.
    """
    for name, source in ((name, as_source(source)) for name, source in sources.items()):
        shown = _shown(name, source, dialogues)
        try:
            values = source(handed_out(source, shown), task) if shown else []
        except RewardFailure:
            raise
        except Exception as error:
            raise RewardFailure(f"reward source {name!r} failed on {task.name}: {told(error)}{_hint(shown)}") from error
        _must_fit(name, values, shown)
        for dialogue, row in zip(shown, values, strict=True):
            for utterance, value in zip(dialogue.utterances, row, strict=True):
                if value is None or name in utterance.rewards:
                    continue
                try:
                    finite = math.isfinite(value)
                except (TypeError, ValueError):  # such as a text, or a tensor of several numbers
                    finite = False
                if not finite:
                    raise RewardFailure(f"reward source {name!r} gave {value!r:.80} to {where(dialogue, utterance)}")
                utterance.rewards[name] = float(value)


def handed_out(source: RewardSource, dialogues: list[Dialogue]) -> list[Dialogue]:
    """Return what a source is handed: copies of ``dialogues`` for one of the user's, so that no row is edited."""
    if not is_users(source.function if isinstance(source, FunctionSource) else type(source), "maporl"):
        return dialogues
    copies = [own_copy(replace(dialogue, environments={})) for dialogue in dialogues]
    for mine, dialogue in zip(copies, dialogues, strict=True):
        mine.environments = dialogue.environments
    return copies


def _shown(name: str, source: RewardSource, dialogues: list[Dialogue]) -> list[Dialogue]:
    """Return what ``source`` is shown of ``dialogues``, in which nothing is shown that has its reward throughout."""
    if not source.answers_only:
        return [d for d in dialogues if any(name not in u.rewards for u in d.utterances)]
    lacking = [replace(d, utterances=[u for u in d.answers() if name not in u.rewards]) for d in dialogues]
    return [d for d in lacking if d.utterances]


def _must_fit(name: str, values: Any, shown: list[Dialogue]) -> None:
    """Check that there is a value, or None, for each utterance."""
    try:
        fits = [len(row) for row in values] == [len(d.utterances) for d in shown]
    except TypeError:
        fits = False
    if not fits:
        raise RewardFailure(
            f"reward source {name!r}: expected a list for each of {len(shown)} dialogues, with one value for each of "
            f"their {sum(len(d.utterances) for d in shown)} utterances, got {values!r:.80}{_hint(shown)}"
        )


def _hint(shown: list[Dialogue]) -> str:
    """Return what one may have forgotten where utterances were shown that do not answer the question."""
    others = [u for d in shown for u in d.utterances if not u.answers]
    if not others:
        return ""
    return (
        f"; it was also shown utterances that do not answer the question ({others[0].agent}'s, for example), which "
        "have no grade: return None for those that it does not score"
    )


def score_dialogues(
    dialogues: list[Dialogue], task: Task, sources: Mapping[str, RewardSource], weights: Mapping[str, float]
) -> None:
    """Set ``rewards["score"]`` to the weighted sum of the rewards that an utterance has.

    The ``sources`` are asked first. A name in ``weights`` without a source is a reward that the protocol has paid; the
    protocol may pay it to any utterance. A reward of weight 0 makes no score for an utterance that does not answer.

    Raises:
        RewardFailure: a source failed, or an answer has none of these rewards.
    """
    fill_in(dialogues, task, {name: sources[name] for name in weights if name in sources})
    weighted_scores(dialogues, weights)


def weighted_scores(dialogues: list[Dialogue], weights: Mapping[str, float], needed: bool = True) -> None:
    """Set ``rewards["score"]`` from the rewards that the utterances have already.

    Raises:
        RewardFailure: an answer has none of the rewards in ``weights``, and is ``needed`` to have a score.
    """
    for dialogue in dialogues:
        for u in dialogue.utterances:
            earned = u.rewards
            values = [w * earned[name] for name, w in weights.items() if name in earned and (w or u.answers)]
            if values:
                u.rewards["score"] = sum(values)
            elif u.answers and needed:
                grading = f" (grading: {u.grade.reason})" if u.grade else ""
                raise RewardFailure(
                    f"no reward source scored {where(dialogue, u)}: {', '.join(weights)} gave None, and every answer "
                    f"needs a number from one of them{grading}"
                )


def why_not_measured(source: RewardSource, task: Task) -> str:
    """Return why an evaluation on ``task`` does not ask a source; empty if it does."""
    if source.compares:
        return "it compares dialogues, and an evaluation plays each question once"
    if source.learns:
        return "it learns, so what it gives before and after training is not measured alike"
    if source.agents and task.labelled:
        return f"agent {' and '.join(source.agents)} would be asked about every answer"
    return ""


def with_reward_variance(dialogues: list[Dialogue]) -> set[int]:
    """Return the questions that have reward variance: some agent earned different credits in their dialogues."""
    credits: dict[tuple[int, str], list[float]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if "credit" in u.rewards:
                credits.setdefault((dialogue.prompt, u.agent), []).append(u.rewards["credit"])
    return {prompt for (prompt, _), values in credits.items() if differ(values)}


Sums = dict[str, tuple[float, int]]
"""For each metric, the sum of its values and their number."""


def reward_sums(dialogues: list[Dialogue]) -> Sums:
    """Sum every named reward over all utterances, over those of each agent, and over those of each agent and turn."""
    sums: Sums = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            for name, value in u.rewards.items():
                for key in (name, f"{name}/{u.agent}", f"{name}/{u.agent}/turn_{u.turn + 1}"):
                    total, count = sums.get(f"reward/{key}", (0, 0))
                    sums[f"reward/{key}"] = (total + value, count + 1)
    return sums


def mean_rewards(parts: Sequence[Sums]) -> dict[str, float]:
    """Return the means of the rewards in ``parts``, each a result of :func:`reward_sums`, over all dialogues.

    For penalties, also return how many there were.
    """
    totals: Sums = {}
    for part in parts:
        for name, (added, number) in part.items():
            total, count = totals.get(name, (0, 0))
            totals[name] = (total + added, count + number)
    means = {name: total / count for name, (total, count) in totals.items()}
    counts = {f"count/{n.removeprefix('reward/')}": float(c) for n, (_, c) in totals.items() if "/penalty/" in n}
    return means | counts


def shares_right(verdicts: Collection[tuple[bool, bool | None]]) -> list[float]:
    """Return the share of verdicts that are right, among those that should be True and then among the others.

    A verdict is what it should be, and what it is. None is never right. A side without any verdict is left out. The
    mean of both is the balanced accuracy, which says nothing at 0.5 however rare one side is.
    """
    sides = [[said is ideal for wanted, said in verdicts if wanted is ideal] for ideal in (True, False)]
    return [fmean(side) for side in sides if side]
