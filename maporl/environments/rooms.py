"""The opened environments of one dialogue, with checks of their texts, results and rewards. Imports no torch."""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

from maporl.config.imports import told, words_of
from maporl.config.schema import EnvironmentSection
from maporl.environments.base import Environment, Tool, as_result
from maporl.errors import ConfigError
from maporl.text import cleaned
from maporl.types import Act, Example, Message, Result
from trl_ext.chat.written_values import check_depth
from trl_ext.errors import retold

LARGEST = 2**20
"""Most characters of a result that are looked at."""


class EnvironmentFailure(ConfigError):
    """An environment's own code failed: its construction, reset, fork or reward."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment of a run.

    Args:
        name: its name.
        make: makes an instance, without arguments.
        agents: the agents to which it belongs, in order. They are told of it, and nobody else is paid by it.
        options: its limits, and what happens if it does not answer in time. ``use``, ``options`` and ``agents`` of
            the section are not read here.
        part: the class or the function with which ``make`` makes one.
    """

    name: str
    make: Callable[[], Environment]
    agents: tuple[str, ...]
    options: EnvironmentSection
    part: Any = None


@dataclass
class Room:
    """One opened environment. ``log`` has (step, agent, tool, arguments, text) of each call."""

    spec: EnvironmentSpec
    world: Environment
    seed: int
    row: dict[str, Any]
    said: dict[str, str]
    tools: dict[str, dict[str, Tool]] = field(default_factory=dict)
    log: list[tuple[int, str, str, dict[str, Any], str]] = field(default_factory=list)
    lost: bool = False
    closed: bool = False

    def tool(self, agent: str, name: str) -> Tool:
        """Return a tool of ``agent`` by its name."""
        if agent not in self.tools:
            self.tools[agent] = {tool.name: tool for tool in self.world.tools(agent)}
        return self.tools[agent][name]


@dataclass
class Rooms:
    """The environments of one dialogue, by name. ``heard`` has the agents that have been told how each one began."""

    example: Example
    key: tuple
    prompt: list[Message]
    open: dict[str, Room] = field(default_factory=dict)
    heard: set[tuple[str, str]] = field(default_factory=set)

    def where(self, name: str) -> str:
        """Return the words with which errors of an environment begin: its name, the question and the seed."""
        return f"environment {name!r}, question {self.example.id}, seed {self.open[name].seed}"

    def news(self, agent: str) -> str:
        """Return what ``agent`` is told before its next turn: how its environments began, and what is new there.

        Raises:
            EnvironmentFailure: ``observe`` raised something, or returned neither a text nor None.
        """
        parts = []
        for name, room in self.open.items():
            if agent not in room.spec.agents:
                continue
            if (name, agent) not in self.heard:
                self.heard.add((name, agent))
                parts.append(room.said.get(agent, ""))
            parts.append(self._text(name, partial(room.world.observe, agent), f"observe({agent!r})") or "")
        return "".join(parts)

    def state(self) -> str | None:
        """Return the name of the situation, from the environments that name it.

        Raises:
            EnvironmentFailure: ``state`` raised something, or returned neither a text nor None.
        """
        named = []
        for name, room in self.open.items():
            state = self._text(name, room.world.state, "state()")
            if state is not None:
                named.append(state)
        return "; ".join(named) or None

    def _text(self, name: str, ask: Callable[[], Any], what: str) -> str | None:
        """Return the text or None that an environment's own code returns."""
        where = f"{self.where(name)}: {what}"
        said = guarded(ask, where)
        if said is not None and not isinstance(said, str):
            raise EnvironmentFailure(f"{where} returned {said!r:.80}, expected a text or None")
        return None if said is None else cleaned(said)

    @property
    def lost(self) -> list[str]:
        """The names of the environments that did not answer in time."""
        return [name for name, room in self.open.items() if room.lost]


def environment_seed(key: tuple, name: str) -> int:
    """Return the seed of environment ``name`` in the dialogue ``key``."""
    digest = hashlib.sha256(repr((*key, "environment", name)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def texts_by_agent(said: Any, spec: EnvironmentSpec) -> dict[str, str]:
    """Return what an environment said at its beginning, by agent.

    Raises:
        EnvironmentFailure: it is neither a text, nor texts for agents of the environment, nor None.
    """
    if said is None:
        return {}
    if isinstance(said, str):
        return dict.fromkeys(spec.agents, cleaned(said))
    if isinstance(said, Mapping) and all(isinstance(text, str) for text in said.values()):
        unknown = [agent for agent in said if agent not in spec.agents]
        if not unknown:
            return {agent: cleaned(text) for agent, text in said.items()}
        raise EnvironmentFailure(f"reset told {unknown[0]!r:.40} something, but {_whose(spec, unknown[0])}")
    raise EnvironmentFailure(f"reset returned {said!r:.80}, expected a text, texts by agent, or None")


def payments(value: Any, spec: EnvironmentSpec, where: str) -> dict[str, float]:
    """Return what an environment paid, by agent. ``where`` stands before errors.

    Raises:
        EnvironmentFailure: an amount is not a finite number, or is for an agent to whom the environment does not
            belong.
    """
    if value is None:
        return {}
    paid = dict(value) if isinstance(value, Mapping) else dict.fromkeys(spec.agents, value)
    numbers = {agent: finite(amount) for agent, amount in paid.items()}
    for agent, amount in paid.items():
        if agent not in spec.agents:
            raise EnvironmentFailure(f"{where} paid {amount!r:.40} to {agent!r:.40}, but {_whose(spec, agent)}")
        if numbers[agent] is None:
            raise EnvironmentFailure(
                f"{where} paid {amount!r:.40} to {agent!r:.40}; expected a finite number, or finite numbers for the "
                f"agents {list(spec.agents)}"
            )
    return {agent: number for agent, number in numbers.items() if number is not None}


def _whose(spec: EnvironmentSpec, agent: Any) -> str:
    """Return the words of errors that say to whom an environment belongs, and how it would belong to ``agent`` too."""
    return (
        f"environment {spec.name!r} belongs to {list(spec.agents)}; leave {agent!r:.40} out, or let it belong to this "
        f"agent too: name {spec.name!r} in agents.NAME.tools, or list the agent in environments.{spec.name}.agents"
    )


def call_payment(rooms: Rooms, act: Act, reward: Any) -> float | None:
    """Return what a call paid at once, or None.

    Raises:
        EnvironmentFailure: it is not a finite number.
    """
    paid = None if reward is None else finite(reward)
    if paid is None and reward is not None:
        where = f"tool {act.name!r}, question {rooms.example.id}" if act.place is None else rooms.where(act.place)
        raise EnvironmentFailure(f"{where}: {act.name}() of {act.agent!r} paid {reward!r:.40}; expected a finite one")
    return paid


def finite(value: Any) -> float | None:
    """Return a number as a float, or None if ``value`` is not a finite number. NumPy's numbers are numbers.

    >>> finite(True), finite(10**400), finite("1")
    (1.0, None, None)
    """
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def readable(value: Any) -> Result:
    """Return what a tool returned, with a text of bounded size without characters that no terminal should see.

    Raises:
        TypeError: the value of a :class:`Result` is not JSON, or deeper than
            :data:`trl_ext.chat.written_values.DEEPEST`, so that no record could hold it.
    """
    result = as_result(value)
    if result.value is not None:
        try:
            check_depth(result.value)
            json.dumps(result.value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the value of a Result must be JSON: {error}") from None
    return replace(result, text=cleaned(str(result.text)[:LARGEST]))


def read_by(read: Callable[[Any], Result], value: Any) -> Any:
    """Return what ``read`` makes of what a tool returned, or a coroutine that does so once this is there."""
    if not inspect.isawaitable(value):
        return read(value)

    async def awaited() -> Result:
        return read(await value)

    return awaited()


def raised(error: BaseException) -> Result:
    """Return what an agent is told of an error that a tool raised: its first 300 characters in one line."""
    words = f"{type(error).__name__}: {words_of(error)}"
    return Result(cleaned(" ".join(words.split())[:300]), error="raised")


def guarded(run: Callable[[], Any], where: str) -> Any:
    """Return what an environment's own code returns.

    Raises:
        EnvironmentFailure: it raised something, or tried to end the program. The message begins with ``where``.
    """
    with retold((Exception, SystemExit), lambda error: failure(error, where), cause=True):
        return run()


def failure(error: BaseException, where: str) -> BaseException:
    """Return the error to raise for what an environment's own code raised."""
    if isinstance(error, EnvironmentFailure):
        return EnvironmentFailure(f"{where}: {error}")
    if isinstance(error, Exception | SystemExit):  # a program that ended here would say that all is well
        return EnvironmentFailure(f"{where}: {told(error)}")
    return error


def shown(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as they stand in errors."""
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items())
