"""``maporl sharing``: one policy for all agents of a team, or a policy for each.

Whether agents of one base model should share a policy is the first question of a team. A shared policy learns from all
answers, and a role whose gradients are large can capture it; policies apart may learn more and fall further (arXiv
2605.24202).
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Values, load_config, load_libraries
from maporl.config.command_line import command
from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.studies.comparing.command import compare_all

SHARED, APART = "shared", "apart"
MEASUREMENTS = 20
"""How often the gradients of roles are measured, if the configuration does not say."""


@command
def sharing(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs; what it has stays.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds to train with, from that of the run on.")] = 5,
) -> None:
    """Train a team with one shared policy and with a policy for each agent, and compare them over seeds.

    Writes a run for each seed and arm, and sharing.md and sharing.json. Called again, it goes on where it ended.
    """
    settings = load_config(values, config, set_)
    load_libraries()
    compare_all(both(settings), output, range(settings.seed, settings.seed + seeds), "sharing")


def both(config: Config) -> dict[str, Config]:
    """Return a configuration with one policy for all agents that learn, and with a policy for each.

    Raises:
        ConfigError: fewer than two agents learn.
    """
    learn = [name for name, agent in config.agents.items() if agent.trainable and agent.weights]
    if len(learn) < 2:
        raise ConfigError(f"sharing: expected two agents or more that learn, got {learn}; add agents")
    measured = config.training.role_gradients or max(1, config.updates // MEASUREMENTS)
    training = replace(config.training, role_gradients=measured)
    return {
        arm: replace(
            config,
            training=training,
            agents={
                name: replace(agent, policy=policy) if name in learn else agent for name, agent in config.agents.items()
            },
        )
        for arm, policy in ((SHARED, SHARED), (APART, None))
    }
