"""Evaluate a team without a trainer, on one task or on a suite of benchmarks. ``maporl eval`` calls this."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from maporl.config import Config
from maporl.errors import ConfigError, refuse
from maporl.evaluation.metrics import Evaluation, Share, majority_credit
from maporl.evaluation.suite import SuiteResult, summarise
from maporl.protocols.debate import Debate
from maporl.rollout.player import Player
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.tasks import Task, build_task
from maporl.team.exchange import exchanged as faults_of_exchange
from maporl.text import printable
from maporl.types import Dialogue, Grade
from trl_ext.ppo.options import Decoding
from trl_ext.process.random_states import forked_rng


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


CHUNK = 32
"""The number of questions that are played at a time."""


def play_suite(
    player: Player, tasks: Mapping[str, Task], samples: int, decoding: Decoding, seed: int
) -> list[SuiteResult]:
    """Play ``samples`` dialogues on each question of each task, and return each task's measurements.

    ``decoding`` says how answers are sampled. ``seed`` sets torch's random state before each task.
    """
    results = []
    for name, task in tasks.items():
        dialogues: list[Dialogue] = []
        torch.manual_seed(seed)
        with tqdm(range(0, len(task), CHUNK), desc=printable(name), leave=False, dynamic_ncols=True) as bar:
            for start in bar:
                examples = [task[i] for i in range(start, min(start + CHUNK, len(task)))]
                played = player.play(examples, task, decoding, samples)
                player.scorer.grade(played, task)
                for dialogue in played:
                    dialogue.prompt += start
                dialogues += played
        results.append(summarise(name, dialogues, samples))
    return results


def play_baselines(
    player: Player, task: Task, evaluation: Evaluation, decoding: Decoding, seed: int
) -> dict[str, Share]:
    """Let each agent answer the questions of ``evaluation`` alone: once, and by a majority vote over several samples.

    ``decoding`` samples the single answer. The samples of the vote are drawn as in training. Each round
    samples one answer to every question. Rounds go on until they have sampled as many tokens as the dialogues of
    ``evaluation``.

    Returns:
        The share of right answers of each baseline, by its name. It is empty where the protocol brings its own
        questions, as a game does, because nobody could answer them alone.
    """
    if player.protocol.own_questions:
        return {}
    examples = [task[i] for i in range(evaluation.questions)]
    alone = Debate(turns=1, opening=player.protocol.opening)
    baselines: dict[str, Share] = {}

    def round_of(agent: str, decoding: Decoding, training: bool = False) -> tuple[list[Grade], int]:
        specs = {agent: player.specs(training=training)[agent]}
        driver = player.driver(task, decoding, protocol=alone, specs=specs, scores=False)
        played = driver.play(examples)
        answers = [d.utterances[0] for d in played]
        grades = task.grade_many([d.example for d in played], [u.text for u in answers])
        return grades, sum(len(u.response_ids) for u in answers)

    for agent in (name for name in player.speakers if name in player.team.policies_of):
        with forked_rng():
            torch.manual_seed(seed)
            single, _ = round_of(agent, decoding)
            baselines[f"{agent} alone"] = Share(sum(bool(g.correct) for g in single), len(single))
            rounds, sampled = [], 0
            while sampled < evaluation.tokens:
                grades, tokens = round_of(agent, player.options.decoding, training=True)
                rounds.append(grades)
                sampled += tokens
        votes = sum(majority_credit(grades) for grades in zip(*rounds, strict=True))
        baselines[f"majority of {len(rounds)} by {agent}"] = Share(votes, len(examples))
    return baselines
