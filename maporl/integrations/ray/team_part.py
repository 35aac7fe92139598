"""The part of a team that the processes of a group hold: weights for its own policies, and none for the others."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from transformers import set_seed

from maporl.integrations.ray.member import GroupSpec
from maporl.storage.run_folder import INITIAL
from maporl.team.loading import load_agents, load_tokenizers
from maporl.team.team import Team
from maporl.team.weights import load_initial


def load_part(spec: GroupSpec, trained: Collection[str], receives: bool = False) -> Team:
    """Return the team of a run with weights for the policies of the group only. The others are on the meta device.

    Policies of the run's folder ``initial/`` begin with what is there.

    Args:
        spec: the group.
        trained: those of its policies that are trained here. A process that only samples trains none.
        receives: whether this process will receive the weights of models from another one.

    Raises:
        ConfigError: a model or an adapter cannot be loaded.
        CheckpointError: ``initial/`` is damaged.
    """
    set_seed(spec.args.seed)
    torch.manual_seed(spec.seed)
    config = spec.config
    agents = load_agents(config, load_tokenizers(config), receives=receives, only=spec.policies)
    learning = [
        replace(
            agent,
            trainable=agent.trainable and (agent.policy or agent.name) in trained,
            by_turn=tuple(
                replace(entry, trainable=entry.trainable and entry.name in trained) for entry in agent.by_turn
            ),
        )
        for agent in agents
    ]
    team = Team(learning)
    load_initial([team.policies[name] for name in spec.policies], Path(config.output_dir) / INITIAL)
    for name in spec.policies:
        team.policies[name].voice.end_at(*spec.stops[name])
    return team
