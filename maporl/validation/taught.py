"""Checks, before a model loads, that the warm start can write what each agent is to learn."""

import random
from collections.abc import Mapping

from maporl.config.schema import Config
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.protocols import build_protocol, speakers
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks.base import Task
from maporl.training.teacher import play_teacher

TRIED = 8
"""How many questions the teacher plays."""


def check_taught(config: Config, task: Task, world: World) -> None:
    """Let the teacher of the warm start play some questions in ``world``, with right replies and with wrong ones.

    Raises:
        ConfigError: neither the protocol nor the task says what an agent is taught.
    """
    if not config.warm_start.steps:
        return
    names = tuple(config.agents)
    protocol = build_protocol(config.protocol, names)
    specs = {
        name: SpeakerSpec("scripted", (name,), role=config.agents[name].role)
        for name in speakers(config.protocol, names)
    }
    rng = random.Random(config.seed)
    examples = [task[rng.randrange(len(task))] for _ in range(TRIED)]
    play_teacher(task, protocol, specs, config.warm_start, rng, examples, world)


def check_taught_calls(config: Config, task: Task, tools: Mapping[str, AgentTools]) -> None:
    """Check that the warm start can write the calls that it teaches. ``tools`` are what agents may call.

    Raises:
        ConfigError: an agent's call format is one that only its chat template knows.
    """
    for agent, own in tools.items():
        if not config.warm_start.steps or not config.warm_start.pupil(agent).calls:
            continue
        for name, arguments in task.write_calls(task[0], own.checks.keys()):
            try:
                own.format.write(name, arguments)
            except ConfigError as error:
                raise ConfigError(f"agents.{agent}: {error}") from None
