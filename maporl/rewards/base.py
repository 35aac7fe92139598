"""The contract of a reward source, and the error of one that fails. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maporl.config.imports import must_take
from maporl.errors import ConfigError, UserError
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance

Values = list[list[float | None]]
"""One value for each utterance of each dialogue; None where the source does not apply."""
Scoring = Callable[[list[Dialogue], Task], Values]
"""A function that gives them."""


class RewardFailure(UserError, RuntimeError):
    """A reward is missing, not finite, or its source raised; names source, dialogue, agent and turn."""


class RewardSource:
    """One named reward: ``source(dialogues, task)`` gives one value per utterance of every dialogue.

    Derive from it where a source keeps something between updates; a plain function of the same arguments serves where
    it does not (:func:`as_source` wraps it). A source that fails raises; nothing turns a failure into 0.
    """

    answers_only: bool = False
    """Whether it is shown only the utterances that answer the question. All sources that come with maporl are. A source
    of one's own is shown whole dialogues, and returns None for an utterance that it does not score."""
    agents: tuple[str, ...] = ()
    """The agents of the team that it asks, such as a judge."""
    reads_environments: bool = False
    """Whether it reads the environments of dialogues, which then stay open until they are scored."""
    compares: bool = False
    """Whether a value depends on other dialogues of the question or the update. Evaluations do not ask it."""
    learns: bool = False
    """Whether it changes while a team is trained: then :meth:`save` and :meth:`load` make it part of checkpoints."""

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """One value for each utterance of each dialogue, or None where it does not apply."""
        raise NotImplementedError(f"{type(self).__name__}: a reward source defines __call__(dialogues, task)")

    def meet(self, dialogues: list[Dialogue]) -> None:
        """Exchange with other processes what the values of an update's ``dialogues`` depend on, before they are scored.

        A trainer lets all processes call this together, each with its own dialogues. By default nothing is exchanged.
        With ``branching.resample`` it does so whenever questions have been replaced, and the dialogues that stayed are
        scored again.
        """

    def after_update(self, update: int, dialogues: list[Dialogue], task: Task) -> dict[str, float]:
        """Learn from this process's graded ``dialogues`` of ``update`` on ``task``; returns numbers to log.

        All processes call it.
        """
        return {}

    def follow(self, state: Callable[[], Any]) -> None:
        """Take what returns the trainer's state. A trainer calls this once; without a trainer nobody does."""

    def remembered(self) -> dict[str, str]:
        """What a checkpoint keeps besides weights to compare on resume, such as which verifier it asks.

        By default nothing.
        """
        return {}

    def recall(self, kept: Mapping[str, str]) -> None:
        """Compare with what :meth:`remembered` returned in an earlier process of the run, and raise if it must not
        differ."""

    def save(self, folder: Path) -> None:
        """Write what :meth:`load` needs into ``folder``, which is empty."""

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`."""


def check_environments(readers: Sequence[str], isolated: Mapping[str, bool]) -> None:
    """Check that rewards that read environments can: ``isolated`` says of each environment whether it is in a process.

    Raises:
        ConfigError: the run has no environment, or one is in another process.
    """
    if readers and not isolated:
        raise ConfigError(f"reward {readers[0]!r} has the parameter environments, and the run has none; remove it")
    apart = [name for name, is_apart in isolated.items() if is_apart]
    if readers and apart:
        raise ConfigError(
            f"reward {readers[0]!r} reads environments, but environments.{apart[0]} is in a process of its own "
            "(isolate: process); remove isolate, or let the environment pay the reward (get_reward)"
        )


class FunctionSource(RewardSource):
    """A function ``(dialogues, task) -> values`` as a source."""

    def __init__(self, function: Scoring, answers_only: bool = False, compares: bool = False):
        self.function, self.answers_only, self.compares = function, answers_only, compares

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """The function's values."""
        return self.function(dialogues, task)


def as_source(source: RewardSource | Scoring) -> RewardSource:
    """``source`` itself, or a function wrapped as one.

    Raises:
        ConfigError: it is neither a source nor a function of dialogues and a task.
    """
    if not isinstance(source, RewardSource):
        must_take(source, ("dialogues", "task"), f"reward source {getattr(source, '__name__', source)}")
    return source if isinstance(source, RewardSource) else FunctionSource(source)


def where(dialogue: Dialogue, utterance: Utterance) -> str:
    """Names an utterance for people: agent, turn (from 1), dialogue."""
    return f"agent {utterance.agent!r}, turn {utterance.turn + 1}, dialogue {dialogue.example.id}.{dialogue.rollout}"
