"""The part of a team that the processes of a group hold: weights for its own policies, and none for the others."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from transformers import set_seed

from maporl.config import Config
from maporl.team.initial import INITIAL, load_initial
from maporl.team.loading import load_agents, load_tokenizers
from maporl.team.team import Team


def load_part(config: Config, policies: Collection[str], trained: Collection[str], receives: bool = False) -> Team:
    """Return the team of ``config`` with weights for ``policies`` only. The others are on the meta device.

    Policies of the run's folder ``initial/`` begin with what is there.

    Args:
        config: the configuration.
        policies: the names of the policies to load.
        trained: those of them that are trained here. A process that only samples trains none.
        receives: whether this process will receive the weights of models from another one.

    Raises:
        ConfigError: a model or an adapter cannot be loaded.
        CheckpointError: ``initial/`` is damaged.
    """
    set_seed(config.seed)
    agents = load_agents(config, load_tokenizers(config), receives=receives, only=policies)
    learning = [
        replace(
            agent,
            trainable=agent.trainable and (agent.policy or agent.name) in trained,
            by_turn=tuple(replace(own, trainable=own.trainable and own.name in trained) for own in agent.by_turn),
        )
        for agent in agents
    ]
    team = Team(learning)
    load_initial([team.policies[name] for name in policies], Path(config.output_dir) / INITIAL)
    return team
