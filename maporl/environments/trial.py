"""Try an environment without models, as a run would use it. Imports no torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maporl.config.imports import unknown
from maporl.config.schema import EnvironmentSection
from maporl.environments.arguments import ArgumentCheck
from maporl.environments.base import CallRefused
from maporl.environments.build import environment_spec
from maporl.environments.rooms import EnvironmentFailure, Rooms
from maporl.environments.world import World, fork_rooms
from maporl.errors import ConfigError
from maporl.types import Act, Example, Result
from trl_ext.errors import retold
from trl_ext.process.random_states import GeneratorStates, generator_states, same_states

NAME = "environment"
"""The name of the environment that is tried, in errors."""
TryCall = tuple[str, str, Mapping[str, Any]]
"""The agent, the tool and the arguments of a call."""


@dataclass
class Trial:
    """The record of a trial of an environment.

    Args:
        said: what agents were told at its beginning.
        results: what each call returned, in order. The ``seconds`` of all are 0.
        paid: what it paid each agent at its end.
    """

    said: dict[str, str]
    results: list[Result] = field(default_factory=list)
    paid: dict[str, float] = field(default_factory=dict)


def check_environment(
    environment: Callable[[], Any],
    calls: Sequence[TryCall] = (),
    row: Mapping[str, Any] | None = None,
    agents: Sequence[str] = ("ann",),
    seed: int = 0,
) -> Trial:
    """Try an environment without models, as a run would use it, and return what happened. For tests of one's own.

    It reads the tools of each agent, begins, makes the ``calls``, asks for the reward, and closes. A call that raises
    is reported to the agent, as in a run. If the environment says that it can be forked, it is forked before the calls
    and after half of them. The calls that are left are made in the fork first, and must then return the same in the
    environment itself. An environment whose calls run at the same time as those of other instances must leave alone
    what these share: the global random generators of Python and NumPy, and the working folder.

    Args:
        environment: a class or a function that makes one without arguments: a :class:`maporl.Environment`, or a class
            for TRL's ``environment_factory``.
        calls: what agents do, in order.
        row: the columns of the question: ``question``, ``answer``, and its other values.
        agents: the agents that act in it.
        seed: two trials with the same seed begin with the same one.

    Raises:
        ConfigError: it cannot be made, begun, forked or closed, its tools are not valid or change, a call names an
            unknown agent or tool or has wrong arguments, what it says or pays is not what it must be, it does not
            answer in time, a fork differs, or it changes what instances share.
    """
    columns = dict(row or {})
    example = Example("trial", str(columns.pop("question", "")), str(columns.pop("answer", "")), columns)
    spec = environment_spec(NAME, environment, EnvironmentSection(use=NAME), agents, agents)
    world = World(environments={NAME: spec})
    try:
        tried = _Tried(world, Rooms(example, ("trial", seed), [{"role": "user", "content": example.question}]))
        acts = [_act(world, agents, number, call) for number, call in enumerate(calls, 1)]
        trial = Trial(tried.begin())
        forks = {}
        for number, act in enumerate(acts):
            if number in (0, len(acts) // 2) and world.offers.forks(NAME) != "no":
                forks[number] = tried.fork(number, acts)
            trial.results.append(tried.call(number, act))
        for number, fork in forks.items():
            tried.must_agree(number, fork, Trial(trial.said, trial.results[number:]))
        trial.paid = tried.end()
        return trial
    finally:
        world.close()


def _act(world: World, agents: Sequence[str], number: int, call: TryCall) -> Act:
    """Return the act of a call, whose arguments were checked as those of models are."""
    agent, name, arguments = call
    if agent not in agents:
        raise ConfigError(f"call {number}: agent {unknown(agent, agents)}")
    tools = {tool.name: tool for tool in world.offers.tools_of(NAME, agent)}
    if name not in tools:
        raise ConfigError(f"call {number}: tool {unknown(name, tools)}")
    with retold(CallRefused, lambda error: ConfigError(f"call {number}, {name}: {error}")):
        return Act(agent, name, ArgumentCheck(tools[name])(dict(arguments)), 0, NAME)


class _Tried:
    """One environment in use."""

    def __init__(self, world: World, rooms: Rooms):
        self.world, self.rooms = world, rooms
        for agent in world.environments[NAME].agents:
            tools = world.offers.tools_of(NAME, agent)
            for number, tool in enumerate(tools):
                ArgumentCheck(tool)
                if tool.name in [other.name for other in tools[:number]]:
                    raise ConfigError(f"tools({agent!r}) has two tools called {tool.name!r}; rename one of them")

    def begin(self) -> dict[str, str]:
        before = _hidden_state()
        self.world.begin([self.rooms])
        room = self.rooms.open[NAME]
        self._must_leave(before, "reset()")
        for agent in room.spec.agents:
            offered = [tool.schema() for tool in self.world.offers.tools_of(NAME, agent)]
            if [tool.schema() for tool in room.world.tools(agent)] != offered:
                raise EnvironmentFailure(
                    f"{self.rooms.where(NAME)}: tools({agent!r}) returned other tools after reset() than before it; "
                    "offer all of them, and let the tools that cannot be used say so"
                )
        return dict(room.said)

    def call(self, number: int, act: Act, rooms: Rooms | None = None) -> Result:
        before = _hidden_state()
        rooms = rooms or self.rooms
        for agent in rooms.open[NAME].spec.agents:
            rooms.news(agent)
        rooms.state()
        (result,) = self.world.act([(rooms, number, act)], {})
        what = f"call {number + 1}, {act.name}()"
        if rooms.open[NAME].lost:
            raise EnvironmentFailure(f"{rooms.where(NAME)}: {what}: {result.text}")
        self._must_leave(before, what)
        return Result(result.text, result.value, result.error, result.reward, result.done)

    def fork(self, number: int, acts: Sequence[Act]) -> Trial:
        """Fork it after ``number`` calls, and make the calls that are left in the fork."""
        fork = fork_rooms(self.world, self.rooms, number, True, set())
        try:
            left = [self.call(place, act, fork) for place, act in enumerate(acts) if place >= number]
            return Trial(dict(fork.open[NAME].said), left)
        finally:
            self.world.drop(fork)

    def must_agree(self, number: int, fork: Trial, trunk: Trial) -> None:
        """Check that a fork after ``number`` calls went on as the environment itself did later."""
        if fork.said != trunk.said:
            raise EnvironmentFailure(f"{self.rooms.where(NAME)}: reset() told {fork.said}, not {trunk.said}, by a seed")
        for place, (one, other) in enumerate(zip(fork.results, trunk.results, strict=True), number + 1):
            if one != other:
                raise EnvironmentFailure(
                    f"{self.rooms.where(NAME)}: call {place} gave {_shown(one)} in a fork after {number} calls, and "
                    f"then {_shown(other)} in itself; a fork must share nothing that calls change, and reset(seed) "
                    "must decide everything"
                )

    def end(self) -> dict[str, float]:
        before = _hidden_state()
        paid = self.world.finish(self.rooms).get(NAME, {})
        if self.rooms.open[NAME].lost:
            raise EnvironmentFailure(f"{self.rooms.where(NAME)}: reward() did not answer")
        if self.world.counts[f"env/{NAME}/close_failed"]:
            raise EnvironmentFailure(f"{self.rooms.where(NAME)}: close() failed; the reason was printed")
        self._must_leave(before, "reward() or close()")
        return paid

    def _must_leave(self, before: Any, what: str) -> None:
        """Check that code of the environment left alone what instances share."""
        if self.rooms.open[NAME].world.concurrent and (parts := _changed(before)):
            raise EnvironmentFailure(
                f"{self.rooms.where(NAME)}: {what} changed {' and '.join(parts)}, which all instances share; use a "
                "generator and paths of the instance's own, or set concurrent = False, so that calls take turns and "
                "it is put back"
            )


def _shown(result: Result) -> str:
    """Return a result as it stands in errors."""
    more = "" if result.reward is None else f" (paid {result.reward:g})"
    return f"{result.text!r:.60}{more}"


# -- state of the process that code of environments may change ---------------------------------------------------------

_PARTS = ("Python's global random generator", "NumPy's global random generator", "the working folder")


def _hidden_state() -> tuple[GeneratorStates, str]:
    """Return what :data:`_PARTS` are now."""
    return generator_states(), os.getcwd()


def _changed(before: tuple[GeneratorStates, str]) -> list[str]:
    """Return which of :data:`_PARTS` are not as they were ``before``."""
    states, folder = _hidden_state()
    same = (*same_states(before[0], states), before[1] == folder)
    return [part for part, unchanged in zip(_PARTS, same, strict=True) if not unchanged]
