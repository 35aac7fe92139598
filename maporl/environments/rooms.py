"""The opened environments of one dialogue, and what they say, return and pay, checked. Imports no torch."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maporl.config.imports import told
from maporl.config.schema import EnvironmentSection
from maporl.environments.base import Environment, Tool, as_result
from maporl.errors import ConfigError
from maporl.text import well_formed
from maporl.types import Example, Message, Result

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
        agents: the agents that act in it or watch it, in order.
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

    def news(self, agent: str) -> str:
        """Return what ``agent`` is told before its next turn: how its environments began, and what is new there."""
        parts = []
        for name, room in self.open.items():
            if agent not in room.spec.agents:
                continue
            if (name, agent) not in self.heard:
                self.heard.add((name, agent))
                parts.append(room.said.get(agent, ""))
            if told_now := room.world.observe(agent):
                parts.append(told_now)
        return "".join(parts)

    def state(self) -> str | None:
        """Return the name of the situation, from the environments that name it."""
        names = [state for room in self.open.values() if (state := room.world.state()) is not None]
        return "; ".join(names) or None

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
        return dict.fromkeys(spec.agents, said)
    if isinstance(said, Mapping) and all(isinstance(text, str) for text in said.values()):
        unknown = [agent for agent in said if agent not in spec.agents]
        if not unknown:
            return dict(said)
        raise EnvironmentFailure(f"reset told {unknown[0]!r:.40} something, but its agents are {list(spec.agents)}")
    raise EnvironmentFailure(f"reset returned {said!r:.80}, expected a text, texts by agent, or None")


def payments(value: Any, spec: EnvironmentSpec, where: str) -> dict[str, float]:
    """Return what an environment paid, by agent. ``where`` stands before errors.

    Raises:
        EnvironmentFailure: an amount is not a finite number, or is for an agent without this environment.
    """
    if value is None:
        return {}
    paid = dict(value) if isinstance(value, Mapping) else dict.fromkeys(spec.agents, value)
    for agent, amount in paid.items():
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if agent not in spec.agents or not number or not abs(amount) < float("inf"):
            raise EnvironmentFailure(
                f"{where} paid {amount!r:.40} to {agent!r:.40}; expected a finite number, or finite numbers for the agents "
                f"{list(spec.agents)}"
            )
    return {agent: float(amount) for agent, amount in paid.items()}


def readable(value: Any) -> Result:
    """Return what a tool returned, with a text of bounded size without characters that no terminal should see."""
    result = as_result(value)
    text = well_formed(str(result.text)[:LARGEST])
    cleaned = "".join(c if c in "\n\t" or (ord(c) >= 32 and ord(c) != 127) else "\ufffd" for c in text)
    return Result(cleaned, result.value, result.error, result.reward, result.done, result.seconds, result.left_out)


def guarded(run: Callable[[], Any], where: str) -> Any:
    """Return what an environment's own code returns.

    Raises:
        EnvironmentFailure: it raised something. The message begins with ``where``.
    """
    try:
        return run()
    except Exception as error:
        raise failure(error, where) from error


def failure(error: BaseException, where: str) -> BaseException:
    """Return the error to raise for what an environment's own code raised."""
    if isinstance(error, EnvironmentFailure):
        return EnvironmentFailure(f"{where}: {error}")
    if isinstance(error, Exception):
        return EnvironmentFailure(f"{where}: {told(error)}")
    return error


def shown(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as they stand in errors."""
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items())
