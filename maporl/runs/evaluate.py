"""Evaluate a team without a trainer, on one task or on a suite of benchmarks. ``maporl eval`` calls this."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from maporl.config import Config
from maporl.errors import ConfigError, refuse
from maporl.evaluation.metrics import Evaluation
from maporl.evaluation.suite import SuiteResult
from maporl.rollout.evaluations import play_baselines, play_suite
from maporl.rollout.player import Player
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.tasks import Task, build_task
from maporl.team.exchange import exchanged as faults_of_exchange


def evaluate(config: Config, checkpoint: Path | None, exchanged: Sequence[str] = ()) -> Evaluation:
    """Evaluate the team of a configuration, and its baselines without dialogue. Nothing is written.

    ``checkpoint`` is a folder with the weights to evaluate. Without it they are the untrained ones. The agents
    ``exchanged`` each speak with the weights of the next one.

    Raises:
        ConfigError: ``evaluation.questions`` is 0, the evaluation split is empty, or agents cannot exchange weights.
        CheckpointError: ``checkpoint`` lacks a policy.
    """
    section = config.evaluation
    if not section.questions:
        raise ConfigError("evaluation.questions is 0; set it to the number of questions to evaluate on")
    task = build_task(config.task, "eval", config.seed)
    if len(task) == 0:
        raise ConfigError("task: the evaluation split is empty; nothing can be evaluated on it")
    player = _player(config, checkpoint, exchanged)
    evaluation = player.evaluate(task, section.questions, section.decoding, config.seed)
    baselines = play_baselines(player, task, evaluation, section.decoding, config.seed)
    return dataclasses.replace(evaluation, baselines=baselines)


def evaluate_suite(
    config: Config, checkpoint: Path | None, tasks: Mapping[str, Task], samples: int, exchanged: Sequence[str] = ()
) -> list[SuiteResult]:
    """Evaluate the team on several tasks, with ``samples`` dialogues on each question. Nothing is written.

    ``checkpoint`` and ``exchanged`` are those of :func:`evaluate`. Answers are sampled as in evaluations. If these are
    greedy, several ``samples`` would be equal, and they are sampled as in training instead.

    Raises:
        ConfigError: agents cannot exchange weights.
        CheckpointError: ``checkpoint`` lacks a policy.
    """
    greedy = config.evaluation.temperature == 0
    decoding = config.ppo.decoding if samples > 1 and greedy else config.evaluation.decoding
    return play_suite(_player(config, checkpoint, exchanged), tasks, samples, decoding, config.seed)


def _player(config: Config, checkpoint: Path | None, exchanged: Sequence[str]) -> Player:
    """Return the player of the team, after checking that the agents in ``exchanged`` can take each other's place."""
    run = ResolvedRun(config)
    if exchanged:
        refuse(faults_of_exchange(run, exchanged))
    player = loaded_player(run, checkpoint)
    player.exchange(exchanged)
    return player
