"""On-policy updates as a stage of an outer loop (:mod:`maporl.loops`)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

from maporl.config import Config
from maporl.config.loops import LoopSection, PPOStage
from maporl.config.schema import RewardSection, WarmStartSection
from maporl.loops.verifiers import FOLDER
from maporl.rewards.verifier.source import forget_verifiers
from maporl.runs.build import build_trainer, load_checkpoint_weights
from maporl.storage.run_folder import FINAL, RunFolder
from maporl.team.team import Team

RUN = "run"
"""The folder of a stage in which the updates leave their metrics and dialogues."""


def train_by_updates(
    config: Config, stage: PPOStage, team: Team, folder: Path, weights: Path, seed: str, quiet: bool
) -> dict[str, float]:
    """Train ``team`` in place, as the sections of ``config`` describe updates.

    Args:
        config: the loop's configuration.
        stage: the stage.
        team: the team, with the weights at which the stage starts.
        folder: the stage's folder.
        weights: the folder of the stage before it. If a verifier was trained there, it pays.
        seed: decides the order of questions and all that is sampled.
        quiet: whether to hide progress.

    Returns:
        The number of dialogues, and the mean score over the updates.
    """
    run = folder / RUN
    trained = replace(
        config,
        output_dir=str(run),
        seed=Random(seed).getrandbits(31),
        updates=stage.updates,
        loop=LoopSection(),
        warm_start=WarmStartSection(),
        reward=paid_by(config.reward, weights),
        branching=config.branching if stage.group is None else replace(config.branching, group=stage.group),
        training=replace(config.training, learning_rate=stage.learning_rate, save_steps=0),
        evaluation=replace(config.evaluation, questions=0),
    )
    forget_verifiers()
    try:
        build_trainer(trained, team, quiet).train()
        if trained.cluster.backend == "ray":  # other processes have trained copies of the weights
            load_checkpoint_weights(team.policies, run / FINAL)
    finally:
        forget_verifiers()
    metrics = RunFolder(run).read_metrics()
    return {"dialogues": metrics[-1]["episode"], "score": fmean(_score(record) for record in metrics)}


def paid_by(reward: RewardSection, weights: Path) -> RewardSection:
    """Return the rewards of the updates: the score of the verifier that a stage before has trained, or else those of
    the run."""
    if not (weights / FOLDER).is_dir() or reward.verifier is None:
        return reward
    verifier = replace(reward.verifier, model=str(weights / FOLDER), tiny=None)
    return replace(reward, sources={"verifier": 1.0}, verifier=verifier)


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["reward/score"]
