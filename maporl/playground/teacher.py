"""The teacher of a warm start: it plays a protocol and says what each agent is to learn. It needs no model.

Before a model loads, it is checked by some plays that the warm start can write what each agent is to learn.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from maporl.config.schema import PupilSection, WarmStartSection
from maporl.engines.base import Request
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError, Fault
from maporl.protocols.base import Protocol
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.run import ResolvedRun
from maporl.tasks.base import Task
from maporl.tasks.lessons import Lessons, lessons_of
from maporl.types import Call, Dialogue, Example, Utterance
from trl_ext.ppo.options import GREEDY


def play_teacher(
    task: Task,
    protocol: Protocol,
    specs: Mapping[str, SpeakerSpec],
    section: WarmStartSection,
    rng: random.Random,
    examples: list[Example],
    world: World | None = None,
) -> list[Dialogue]:
    """Play ``examples`` as a warm start does. The agents in ``specs`` say what ``section`` teaches them. It needs no
    model.

    Agents with tools of ``world`` call some, with the probability that ``section`` gives, and then answer rightly.

    Raises:
        ConfigError: the task cannot write what an agent says; names the agent and its role.
    """

    lessons = lessons_of(task)
    # the requests of programs come in any order, so that each needs random numbers of its own
    key = (rng.random(),) if protocol.waits else None
    turns: dict[int, _Turn] = {}  # by their conversations, which no two turns have at the same time

    def script(request: Request) -> str:
        agent = request.ask.agent
        draws = rng if request.rng_key is None else random.Random(repr(request.rng_key))
        pupil, tools, role = section.pupil(agent), specs[agent].tools, request.ask.role or specs[agent].role
        try:
            if request.ask.continues is None:
                turns[id(request.transcript)] = _begun(lessons, request, pupil, tools, role, draws)
            turn = turns[id(request.transcript)]
            turn.made += [c for u in request.heard if u.id == request.ask.continues for c in u.calls]
            if tools is not None and (calls := _calls(lessons, turn, tools)):
                return calls
            said = (
                draws.choice(request.ask.taught)
                if request.ask.taught
                else _written(lessons, request, turn.example, pupil, role, draws)
            )
        except Exception as error:
            what = str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"warm_start: {_whose(task, agent, role)}: {what}; {REMEDY}") from error
        if not isinstance(said, str):
            raise ConfigError(f"warm_start: {_whose(task, agent, role)}: expected a text, got {said!r:.80}; {REMEDY}")
        return said

    engines = {name: ScriptedEngine(script) for name in {spec.engine for spec in specs.values()}}
    return RolloutDriver(task, protocol, specs, engines, GREEDY, rng_key=key, world=world).play(examples)


REMEDY = (
    "define write_answer(example, rng, right) of the task, or write_reply(example, rng, right, role) where roles say "
    "different things, or give the protocol's Ask the texts (taught), or set warm_start.steps to 0"
)
"""What to do if nothing says what an agent is taught."""


@dataclass
class _Turn:
    """A student's turn: the question as it takes it, whether it calls, and at once, and the calls it has made."""

    example: Example
    calls: bool
    together: bool
    made: list[Call] = field(default_factory=list)


def _begun(
    lessons: Lessons,
    request: Request,
    pupil: PupilSection,
    tools: AgentTools | None,
    role: str | None,
    rng: random.Random,
) -> _Turn:
    """Return a student's new turn."""
    example = request.example
    if _is_part(lessons, request.ask.caller, role):
        asked = "\n".join(message["content"] for message in request.ask.messages if message["role"] == "user")
        example = lessons.part(example, asked, role)
    calls = tools is not None and rng.random() < pupil.calls
    several = tools is not None and tools.limits.parallel
    return _Turn(example, calls, several and rng.random() < pupil.together)


def _calls(lessons: Lessons, turn: _Turn, tools: AgentTools) -> str:
    """Return the calls that a student makes next, as it writes them, or "" if it makes none."""
    if not turn.calls:
        return ""
    calls = lessons.write_calls(turn.example, tools.checks.keys(), turn.made)
    return "\n".join(tools.format.write(name, arguments) for name, arguments in calls[: None if turn.together else 1])


def is_taught(task: Task, utterance: Utterance) -> bool:
    """Return whether a warm start teaches what was said apart from a conversation.

    It teaches answers, what helpers reply, and what is said in roles for which the task writes.
    """
    return utterance.answers or _is_part(lessons_of(task), utterance.caller, utterance.role)


def _is_part(lessons: Lessons, caller: int | None, role: str | None) -> bool:
    return caller is not None or role in lessons.roles


def _whose(task: Task, agent: str, role: str | None) -> str:
    return f"task {type(task).__name__} does not write what agent {agent!r} says" + (f" as {role!r}" if role else "")


def _written(
    lessons: Lessons, request: Request, example: Example, pupil: PupilSection, role: str | None, rng: random.Random
) -> str:
    """Return a student's reply: another agent's completion, the answer by its own skill, or what the task writes."""
    others = [u for u in request.heard if u.agent != request.ask.agent]
    if pupil.gives_in and others and rng.random() < pupil.gives_in:
        return lessons.write_agreeing(example, rng, rng.choice(others).words(), role)
    right = request.ask.continues is not None or rng.random() >= pupil.wrong
    if pupil.skill is not None and right and request.ask.continues is None:  # after a call it answers rightly
        return lessons.write_by_skill(example, pupil.skill)
    return lessons.write_reply(example, rng, right, role)


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
