"""Checks, before a model loads, that the warm start can write what each agent is to learn."""

import random
from collections.abc import Iterator, Mapping

from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError, Fault
from maporl.playground.teacher import play_teacher
from maporl.rollout.episode import SpeakerSpec
from maporl.run import ResolvedRun
from maporl.tasks.lessons import lessons_of

TRIED = 8
"""How many questions the teacher plays."""


def check_taught(run: ResolvedRun, world: World) -> None:
    """Let the teacher of the warm start play some questions in ``world``, with right replies and with wrong ones.

    Raises:
        ConfigError: neither the protocol nor the task says what an agent is taught.
    """
    config, task = run.config, run.task
    if not config.warm_start.steps:
        return
    specs = {name: SpeakerSpec("scripted", (name,), role=config.agents[name].role) for name in run.speakers}
    rng = random.Random(config.seed)
    examples = [task[rng.randrange(len(task))] for _ in range(TRIED)]
    play_teacher(task, run.protocol, specs, config.warm_start, rng, examples, world)


def taught_calls(run: ResolvedRun, tools: Mapping[str, AgentTools]) -> Iterator[Fault]:
    """Yield the agents whose call format the warm start cannot write, because only their chat template knows it.
    ``tools`` are what agents may call."""
    config, task = run.config, run.task
    for agent, agent_tools in tools.items():
        if not config.warm_start.steps or not config.warm_start.pupil(agent).calls:
            continue
        try:
            for name, arguments in lessons_of(task).write_calls(task[0], agent_tools.checks.keys()):
                agent_tools.format.write(name, arguments)
        except ConfigError as error:
            yield Fault.of(ConfigError(f"agents.{agent}: {error}"))
