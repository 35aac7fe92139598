"""The teacher of a warm start: it plays a protocol and says what each agent is to learn. It needs no model."""

import random
from collections.abc import Mapping

from maporl.config.schema import PupilSection, WarmStartSection
from maporl.engines.base import Request
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.protocols.base import Protocol
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks.base import Task
from maporl.types import Dialogue, Example
from trl_ext.ppo_options import GREEDY


def play_teacher(
    task: Task,
    protocol: Protocol,
    specs: Mapping[str, SpeakerSpec],
    section: WarmStartSection,
    rng: random.Random,
    examples: list[Example],
    world: World | None = None,
) -> list[Dialogue]:
    """Play ``examples`` as a warm start does. The agents in ``specs`` say what ``section`` teaches them. It needs no model.

    Agents with tools of ``world`` call some, with the probability that ``section`` gives, and then answer rightly.

    Raises:
        ConfigError: the task cannot write what an agent says; names the agent and its role.
    """

    def script(request: Request) -> str:
        agent = request.ask.agent
        if (calls := _calls(task, request, section.pupil(agent), specs[agent].tools, rng)) is not None:
            return calls
        role = request.ask.role or specs[agent].role
        try:
            said = (
                rng.choice(request.ask.taught)
                if request.ask.taught
                else _written(task, request, section.pupil(agent), role, rng)
            )
        except Exception as error:
            what = str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"warm_start: {_whose(task, agent, role)}: {what}; {REMEDY}") from error
        if not isinstance(said, str):
            raise ConfigError(f"warm_start: {_whose(task, agent, role)}: expected a text, got {said!r:.80}; {REMEDY}")
        return said

    engines = {name: ScriptedEngine(script) for name in {spec.engine for spec in specs.values()}}
    return RolloutDriver(task, protocol, specs, engines, GREEDY, world=world).play(examples)


REMEDY = (
    "define write_answer(example, rng, right) of the task, or write_reply(example, rng, right, role) where roles say different "
    "things, or give the protocol's Ask the texts (taught), or set warm_start.steps to 0"
)
"""What to do if nothing says what an agent is taught."""


def _calls(
    task: Task, request: Request, pupil: PupilSection, tools: AgentTools | None, rng: random.Random
) -> str | None:
    """Return the calls that a pupil makes before it answers, as it writes them, or None."""
    if tools is None or request.ask.continues is not None or rng.random() >= pupil.calls:
        return None
    calls = task.write_calls(request.example, tools.checks.keys())
    return "\n".join(tools.format.write(name, arguments) for name, arguments in calls) or None


def _whose(task: Task, agent: str, role: str | None) -> str:
    return f"task {type(task).__name__} does not write what agent {agent!r} says" + (f" as {role!r}" if role else "")


def _written(task: Task, request: Request, pupil: PupilSection, role: str | None, rng: random.Random) -> str:
    """Return what a pupil says: what another agent said, the answer by its own skill, or what the task writes."""
    others = [u for u in request.heard if u.agent != request.ask.agent]
    if pupil.gives_in and others and rng.random() < pupil.gives_in:
        return rng.choice(others).words()
    right = request.ask.continues is not None or rng.random() >= pupil.wrong
    if pupil.skill is not None and right:
        return task.write_by_skill(request.example, pupil.skill)
    return task.write_reply(request.example, rng, right, role)
