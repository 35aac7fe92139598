"""Reward functions with the signature of TRL's ``GRPOTrainer``, as reward sources of a team."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from maporl.config.imports import told
from maporl.config.schema import RewardSection
from maporl.rewards.base import RewardFailure, RewardSource, Values
from maporl.tasks.base import Task
from maporl.types import Dialogue
from trl_ext.errors import ArgumentError
from trl_ext.learning.trained import NonFiniteError
from trl_ext.trainer.scoring import (
    RESERVED,
    RewardError,
    RewardFunction,
    call_reward_functions,
    check_parameters,
    reward_name,
)

OF_A_TEAM = ("agents", "turns", "environments")
"""The names of what reward functions get besides the columns, where a team is trained."""
_ROWS = 1000
"""The rows whose columns are looked at, because rows in a list may have different columns."""


class CompletionReward(RewardSource):
    """A function ``f(prompts, completions, **columns) -> list[float | None]`` as a reward source.

    It is called once for all answers of all dialogues, with one row for each answer. What does not answer the question,
    such as a plan or a call of a tool, is not shown to it. ``prompts`` and the columns are those of the data set
    (:class:`maporl.Prompts`), or the question and the ``answer`` of another task. A completion is a text, or
    ``[{"role": "assistant", "content": text}]`` if the prompt has messages. The function also gets ``completion_ids``,
    ``trainer_state``, and the lists ``agents`` and ``turns``, which say who gave each answer in which turn, counted
    from 1. It gets of these what it has parameters for, or all with ``**columns``.

    A function with a parameter ``environments`` gets a list of the environments in which the agents acted, as TRL's
    reward functions do: the instance of the user's class, or ``{name: instance}`` for an agent with several, or None.
    They stay open until all rewards are there.

    Args:
        function: the function, plain or ``async``.
    """

    answers_only = True

    def __init__(self, function: RewardFunction):
        self.function = function
        self.reads_environments = takes_environments(function)
        self.state: Callable[[], Any] = lambda: None

    def follow(self, state: Callable[[], Any]) -> None:
        """Take what returns the trainer's state. Without a trainer, ``trainer_state`` is None."""
        self.state = state

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the function's value of each answer.

        Raises:
            RewardFailure: it failed, or gave anything but one finite number or None for each answer.
        """
        said = [(d.asked(u), u) for d in dialogues for u in d.utterances]
        prompts = [task.prompt(example) for example, _ in said]
        columns: dict[str, list] = {}
        for row, (example, _) in enumerate(said):
            for name, value in task.columns(example).items():
                columns.setdefault(name, [None] * len(said))[row] = value
        columns |= {"agents": [u.agent for _, u in said], "turns": [u.turn + 1 for _, u in said]}
        if self.reads_environments:
            columns["environments"] = [_instances(d, u.agent) for d in dialogues for u in d.utterances]
        completions = [_completion(prompt, u.text) for prompt, (_, u) in zip(prompts, said, strict=True)]
        ids = [u.response_ids for _, u in said]
        try:
            (values,) = call_reward_functions(
                [self.function], prompts, completions, ids, columns, self.state()
            ).values()
        except (RewardError, NonFiniteError) as error:
            cause = error.__cause__  # what the function raised itself
            what = f"reward {reward_name(self.function)!r} failed: {told(cause)}" if cause else str(error)
            raise RewardFailure(what) from error
        if any(isinstance(value, list) for value in values):
            raise RewardFailure(
                f"reward {reward_name(self.function)!r}: gave a list of numbers for one answer; a team is paid one "
                "number for an answer. Numbers for single tokens are for trl_ext.PPOv2Trainer"
            )
        remaining = iter(values)
        return [[next(remaining) for _ in d.utterances] for d in dialogues]  # type: ignore[misc]  # no value is a list


def with_functions(
    reward: RewardSection,
    sources: Mapping[str, RewardSource] | None,
    functions: RewardFunction | Sequence[RewardFunction],
    weights: Sequence[float] | None,
    task: Task,
) -> tuple[RewardSection, dict[str, RewardSource]]:
    """Return ``reward`` and ``sources`` with reward functions in the place of the section's own sources.

    Every function becomes a source of its own name. The default weight is 1. ``task`` has the columns that they get.

    Raises:
        ArgumentError: the list of functions is empty, one is not callable or has a parameter that nothing fills, two
            have one name, the number of weights differs, or a column has the name of what functions get besides the
            columns.
    """
    reward_funcs: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
    if not reward_funcs:
        raise ArgumentError("reward_funcs: expected a function or a list of functions, got an empty list")
    for function in reward_funcs:
        if not callable(function) or isinstance(function, nn.Module):
            raise ArgumentError(
                f"reward_funcs: expected functions f(prompts, completions, **columns), got {function!r:.80}; a reward "
                "model is a source of its own: reward=RewardSection(sources={'verifier': 1.0}, verifier=...), or "
                "maporl.ServedReward"
            )
    check_columns(reward_funcs, task, "train_dataset")
    names = [reward_name(function) for function in reward_funcs]
    if len(set(names)) != len(names):
        raise ArgumentError(f"reward_funcs: expected functions with different names, got {names}; rename one")
    shares = [1.0] * len(reward_funcs) if weights is None else [float(w) for w in weights]
    if len(shares) != len(reward_funcs):
        raise ArgumentError(f"reward_weights: expected {len(reward_funcs)} numbers, for {names}, got {len(shares)}")
    completion_rewards = {name: CompletionReward(function) for name, function in zip(names, reward_funcs, strict=True)}
    section = dataclasses.replace(reward, sources=dict(zip(names, shares, strict=True)))
    return section, {**(sources or {}), **completion_rewards}


def check_columns(functions: Sequence[RewardFunction], task: Task, where: str) -> None:
    """Check that ``task`` has a column for every parameter of reward functions, and none whose name is taken.

    Raises:
        ArgumentError: a parameter has no column and no default, or a column has a taken name. The message of the latter
            begins with ``where``.
    """
    columns = {name for number in range(min(len(task), _ROWS)) for name in task.columns(task[number])}
    if taken := sorted(columns & {*RESERVED, *OF_A_TEAM}):
        raise ArgumentError(f"{where}: the column {taken[0]!r} has the name of what a reward function gets; rename it")
    for function in functions:
        check_parameters(function, sorted({*columns, *OF_A_TEAM}))


def takes_environments(function: RewardFunction) -> bool:
    """Return whether a reward function has a parameter ``environments``."""
    try:
        return "environments" in inspect.signature(function).parameters
    except ValueError:  # some functions that are written in C do not say
        return False


def _instances(dialogue: Dialogue, agent: str) -> Any:
    """Return the environment in which an agent acts: None, the only one, or all by name. A lost one is left out."""
    rooms = {name: room for name, room in dialogue.environments.items() if agent in room.spec.agents and not room.lost}
    instances = {name: room.world.instance for name, room in rooms.items()}
    return next(iter(instances.values()), None) if len(instances) < 2 else instances


def _completion(prompt: Any, text: str) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
