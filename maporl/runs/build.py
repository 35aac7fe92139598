"""Build a trainer or a player from a configuration."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import set_seed

from maporl.config import Config
from maporl.config.backends import BACKENDS
from maporl.config.imports import extension
from maporl.engines.build import build_engines
from maporl.errors import ConfigError
from maporl.playground.teacher import check_taught
from maporl.playground.warm_start import warm_start
from maporl.rewards.base import RewardSource
from maporl.rewards.build import asks_untrained
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.run import ResolvedRun
from maporl.storage.run_folder import INITIAL
from maporl.team.agents import Policy
from maporl.team.loading import split_bases
from maporl.team.team import Team
from maporl.team.weights import check_initial, has_weights, load_unless_received
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.home import TeamHome, home_of
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.validation.load import load
from maporl.validation.preflight import training_arguments
from trl_ext.errors import short_trace
from trl_ext.files.atomic import new_folder
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.files.manifest import write_manifest
from trl_ext.files.paths import below
from trl_ext.learning.checkpoint import CheckpointError
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.process.devices import reuse_memory


@short_trace
def build_trainer(
    config: Config, team: Team | None = None, quiet: bool = False, backend: TeamHome | None = None
) -> MultiAgentPPOTrainer:
    """Build the trainer of a configuration, with loaded and warm-started models.

    The warm-started weights are kept in the run's folder ``initial/``, and a resumed run reads them from there. With
    ``cluster.backend: ray`` or ``tinker``, the models of the trainer's team are empty: their weights are elsewhere.

    Args:
        config: the configuration.
        team: a team to train instead of the one that ``config`` describes.
        quiet: whether to hide progress bars.
        backend: where to train and sample, if ``config.cluster`` does not say it.

    Raises:
        ConfigError: the configuration cannot run.
    """
    return trainer_of(ResolvedRun(config), team, quiet, backend)


def trainer_of(
    run: ResolvedRun, team: Team | None = None, quiet: bool = False, backend: TeamHome | None = None
) -> MultiAgentPPOTrainer:
    """Build the trainer of a run; see :func:`build_trainer`.

    Raises:
        ConfigError: the configuration cannot run.
    """
    config = run.config
    set_seed(config.seed)
    args = training_arguments(config)
    task, held_out = run.task, run.held_out
    if config.warm_start.steps:
        with closing(run.open_tools().world) as world:  # it counts what is called in it
            check_taught(run, world)
    if backend is None and config.grouped:
        name = config.cluster.backend
        backend = extension(BACKENDS[name].home, f"cluster.backend: {name}")(config.cluster, quiet)
    home = home_of(backend)
    team = home.load_team(config, team, lambda loaded: _begin_once(run, loaded, args.device, quiet))
    args.disable_tqdm = quiet
    return MultiAgentPPOTrainer(
        args,
        team,
        task,
        protocol=run.protocol,
        eval_task=held_out,
        reward=config.reward,
        speakers=run.speakers,
        schedule=config.schedule,
        advantage=config.advantage,
        branching=config.branching,
        curriculum=run.curriculum,
        engine_options=_engine_options(config),
        config=config,
        tools=run.open_tools(),
        sampling=run.sampling,
        backend=home,
        sources=home.sources(config),
    )


@short_trace
def build_player(config: Config, checkpoint: Path | None = None) -> Player:
    """Build the player of a configuration.

    ``checkpoint`` is a ``checkpoint-N`` or ``final`` folder with the weights to load. No optimizer is built. Models are
    copied only if untrained weights restate answers.

    Raises:
        ConfigError: the configuration cannot run.
        CheckpointError: ``checkpoint`` lacks a policy.
    """
    return loaded_player(ResolvedRun(config), checkpoint)


def loaded_player(run: ResolvedRun, checkpoint: Path | None = None) -> Player:
    """Build the player of a run; see :func:`build_player`.

    Raises:
        ConfigError: the configuration cannot run.
        CheckpointError: ``checkpoint`` lacks a policy.
    """
    config = run.config
    set_seed(config.seed)
    device = find_device(config)
    team = Team.from_config(config)
    if config.warm_start.steps and checkpoint is None:  # the weights of a checkpoint include the warm start
        _warm_start(run, team, device, quiet=True)
    team.find_stop_ids(config.ppo)
    rows = config.ppo.batch_rows
    untrained = (
        UntrainedWeights.before_training(team, rows) if asks_untrained(config.restate, config.reward.asked) else None
    )
    if checkpoint is not None:
        load_checkpoint_weights(team.policies, checkpoint)
    ready_to_play(team, device)
    return player_of(run, team, untrained)


def find_device(config: Config) -> torch.device:
    """Return this process's device. The first call joins the launcher's processes."""
    state = PartialState(cpu=config.training.use_cpu)
    distributed.check_launcher()
    if state.device.type == "cpu":
        reuse_memory()
    return state.device


def ready_to_play(team: Team, device: torch.device) -> None:
    """Move the team's models to ``device`` and switch dropout off."""
    _move(team, device, {})
    for policy in team.policies.values():
        policy.model.eval()


def _move(team: Team, device: torch.device, places: Mapping[int, torch.device]) -> None:
    """Move the team's models to ``device``, or to their ``places``, which are by the ``id`` of the base model."""
    for policy in team.policies.values():
        if not policy.is_quantized:
            place = places.get(id(base_of(policy.model)), device)
            policy.model.to(place)  # type: ignore[arg-type]  # its decorator hides the signature


def player_of(
    run: ResolvedRun,
    team: Team,
    untrained: UntrainedWeights | None = None,
    sources: Mapping[str, RewardSource] | None = None,
) -> Player:
    """Return the player of a run whose ``team`` is loaded.

    ``untrained`` and ``sources`` are those of :class:`maporl.rollout.player.Player`.

    Raises:
        ConfigError: an engine or a reward source lacks what it needs.
    """
    config = run.config
    engines = build_engines(
        {name: agent.engine for name, agent in team.agents.items()},
        _engine_options(config),
        team.policies,
        config.ppo,
        Path(config.output_dir),
    )
    return Player(
        team,
        run.protocol,
        config.ppo,
        config.reward,
        engines=engines,
        sources=sources,
        speakers=run.speakers,
        common_seed=config.branching.common_seed,
        untrained=untrained,
        restates=config.restate == "base_model",
        tools=run.open_tools(),
        sampling=run.sampling,
    )


def load_checkpoint_weights(policies: Mapping[str, Policy], checkpoint: Path) -> None:
    """Load the weights of a ``checkpoint-N`` or ``final`` folder into the trainable ``policies``.

    Frozen ones get the weights with which the run began, if it has saved them.

    Raises:
        CheckpointError: the folder lacks a policy.
    """
    root = checkpoint / "policies" if (checkpoint / "policies").is_dir() else checkpoint
    for policy in policies.values():
        if policy.trainable:
            folder = below(root, policy.name)
            if not folder.is_dir():
                saved = list_checkpoints(checkpoint)
                hint = f", such as {saved[-1]}, because the run has not ended" if saved else ""
                raise CheckpointError(f"{checkpoint}: no folder for policy {policy.name!r}; give a checkpoint-N{hint}")
            policy.load(folder)
        elif has_weights(initial := below(checkpoint.parent / INITIAL, policy.name)):
            policy.load(initial)


def _engine_options(config: Config) -> dict[str, Any]:
    return {name: agent.options_of_engine() for name, agent in config.agents.items()}


def _warm_start(run: ResolvedRun, team: Team, device: torch.device, quiet: bool) -> None:
    """Warm-start the team on the devices on which it is trained afterwards."""
    config = run.config
    split = config.training.placement == "split"
    _move(team, device, split_bases(team.policies, config.training.use_cpu) if split else {})
    tools = run.open_tools()
    try:
        warm_start(team, run.task, run.protocol, config.warm_start, config.seed, run.speakers, quiet, tools)
    finally:
        tools.world.close()


def _begin_once(run: ResolvedRun, team: Team, device: torch.device, quiet: bool) -> None:
    """Warm-start the team if it is to be, and keep it in the run's ``initial/``; or read it from there."""
    # these weights are PPO's reference, and they must be the same after resuming
    initial = Path(run.config.output_dir) / INITIAL
    if not distributed.is_main():
        distributed.barrier()  # wait until the main process has written it
    if initial.is_dir():
        check_initial(initial)
        for policy in team.policies.values():
            load_unless_received(policy, below(initial, policy.name))
        if distributed.is_main():
            distributed.barrier()
        return
    if run.config.warm_start.steps:
        _warm_start(run, team, device, quiet)
    with new_folder(initial) as partial:
        for policy in team.policies.values():
            policy.save(below(partial, policy.name))
        write_manifest(partial)
    distributed.barrier()


def recipe_parts(name: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Return the method of a recipe as arguments of :class:`maporl.MultiAgentPPOTrainer`.

    They are ``args``, ``protocol``, ``reward``, ``advantage``, ``branching`` and ``schedule``. The team and the
    questions are yours::

        MultiAgentPPOTrainer(team=team, train_dataset=rows, reward_funcs=f, **recipe_parts("grpo_single"))

    Args:
        name: a recipe (``maporl recipes list``), or a YAML file.
        overrides: values to override, such as ``["branching.group=4", "updates=20", "output_dir=runs/grpo"]``. The keys
            are those of the YAML file.

    Raises:
        ConfigError: the recipe does not exist, a value is wrong, or the recipe has a warm start or a curriculum, which
            belong to its own team and task.
    """
    config = load(name, overrides)
    if config.warm_start.steps or config.schedule.curriculum:
        part = "warm_start" if config.warm_start.steps else "schedule.curriculum"
        raise ConfigError(
            f"recipe_parts: {name}: {part} belongs to the configuration's own team and task; run it with 'maporl "
            "train', or remove it and call maporl.warm_start, or pass curriculum="
        )
    return {
        "args": MultiAgentPPOConfig.from_config(config),
        "protocol": ResolvedRun(config).protocol,
        "reward": config.reward,
        "advantage": config.advantage,
        "branching": config.branching,
        "schedule": config.schedule,
    }
