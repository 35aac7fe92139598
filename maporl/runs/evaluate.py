"""Evaluate a team without a trainer, on one task or on a suite of benchmarks. ``maporl eval`` calls this."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from maporl.config import Config
from maporl.errors import ConfigError
from maporl.evaluation.metrics import Evaluation
from maporl.evaluation.suite import SuiteResult
from maporl.rollout.baselines import play_baselines
from maporl.rollout.suite import play_suite
from maporl.runs.build import build_player
from maporl.tasks import Task, build_task


def evaluate(config: Config, checkpoint: Path | None) -> Evaluation:
    """Evaluate the team of a configuration, and its baselines without dialogue. Nothing is written.

    ``checkpoint`` is a folder with the weights to evaluate.

    Raises:
        ConfigError: ``evaluation.questions`` is 0, or the evaluation split is empty.
        CheckpointError: ``checkpoint`` lacks a policy.
    """
    section = config.evaluation
    if not section.questions:
        raise ConfigError("evaluation.questions is 0; set it to the number of questions to evaluate on")
    task = build_task(config.task, "eval", config.seed)
    if len(task) == 0:
        raise ConfigError("task: the evaluation split is empty; nothing can be evaluated on it")
    player = build_player(config, checkpoint)
    evaluation = player.evaluate(task, section.questions, section.decoding, config.seed)
    baselines = play_baselines(player, task, evaluation, section.decoding, config.seed)
    return dataclasses.replace(evaluation, baselines=baselines)


def evaluate_suite(
    config: Config, checkpoint: Path | None, tasks: Mapping[str, Task], samples: int
) -> list[SuiteResult]:
    """Evaluate the team on several tasks, with ``samples`` dialogues on each question. Nothing is written.

    ``checkpoint`` is a folder with the weights to evaluate. Answers are sampled as in evaluations. If these are greedy,
    several ``samples`` would be equal, and they are sampled as in training instead.

    Raises:
        CheckpointError: ``checkpoint`` lacks a policy.
    """
    greedy = config.evaluation.temperature == 0
    decoding = config.ppo.decoding if samples > 1 and greedy else config.evaluation.decoding
    return play_suite(build_player(config, checkpoint), tasks, samples, decoding, config.seed)
