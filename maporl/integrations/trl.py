"""Classes that were written for ``environment_factory`` of TRL's ``GRPOTrainer``, as environments. Imports no torch.

Such a class needs no base class. Its public methods are the tools, ``reset`` gets the columns of the row, and
``get_reward`` pays. A class works here as it does there. These may be added to one:

- ``_close()``, which is called at the end. A public ``close`` without a docstring, which TRL refuses, is called too.
- ``_fork()``, which returns an independent equal instance, so that dialogues can be forked.
- an attribute ``_caller``, which has the name of the agent that calls.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from maporl.environments.base import Environment, Tool, is_trl_class, may_pay
from maporl.errors import ConfigError
from maporl.event_loop import awaited, inside
from maporl.types import Result

NOT_TOOLS = ("reset", "get_reward")


class TRLEnvironment(Environment):
    """An instance of a class for TRL's ``environment_factory``, as an environment of one agent or of several.

    Args:
        made: the instance.
        reward: the attribute that has its reward, for a class without ``get_reward``. None: it pays nothing.

    Raises:
        ConfigError: ``made`` has no ``reset``, its ``reset`` is a coroutine function, ``reward`` is given although
            there is ``get_reward``, or a public method lacks a docstring, a type or a description.
    """

    def __init__(self, made: Any, reward: str | None = None):
        self.made, self._reward = made, reward
        kind = type(made)
        self._kind = kind.__qualname__
        if not is_trl_class(made):
            raise ConfigError(f"environment {self._kind}: expected a class with a method reset, as TRL takes it")
        if inspect.iscoroutinefunction(kind.reset):
            raise ConfigError(f"environment {self._kind}: reset is a coroutine function, never awaited; make it plain")
        if reward is not None and hasattr(kind, "get_reward"):
            raise ConfigError(f"environment {self._kind}: reward: {reward}: get_reward pays already; remove reward")
        self._tools = _tools_of(made)
        self.forks: Literal["copy", "replay", "no"] = "copy" if hasattr(kind, "_fork") else "no"

    @property
    def instance(self) -> Any:
        """The instance of the class, as TRL's reward functions get it."""
        return self.made

    def reset(self, seed: int, row: Mapping[str, Any]) -> str | None:
        """Begin. ``reset`` of the class gets all columns, or of these what it has parameters for.

        The parameter ``seed`` gets the seed, unless the row has a column of this name.

        Raises:
            ConfigError: a parameter has no column, or ``reset`` returned something else than a text or None.
        """
        columns = _chosen(self.made.reset, {"seed": seed, **row}, row, self._kind)
        said = self.made.reset(**columns)
        if isinstance(said, list):
            said = _text_of(said, f"environment {self._kind}: reset")
        if said is not None and not isinstance(said, str):
            raise ConfigError(f"environment {self._kind}: reset returned {said!r:.80}, expected a text or None")
        return said

    def tools(self, agent: str) -> Sequence[Tool]:
        """Return its public methods. A call sets ``_caller``, if the class or the instance has this attribute."""
        return [replace(tool, run=functools.partial(self._run, agent, tool.name)) for tool in self._tools]

    def _run(self, agent: str, name: str, **arguments: Any) -> Any:
        if hasattr(self.made, "_caller"):
            self.made._caller = agent
        method = getattr(self.made, name)
        if inspect.iscoroutinefunction(method):
            return self._awaited(method, arguments)
        try:
            return _shown(method(**arguments), name)
        except Exception as error:
            return _failed(error)

    async def _awaited(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        try:
            return _shown(await inside(method(**arguments)), method.__name__)
        except Exception as error:
            return _failed(error)

    def reward(self) -> float | dict[str, float] | None:
        """Return what ``get_reward`` returns, or the attribute that has the reward.

        Raises:
            ConfigError: the instance has no such attribute.
        """
        if hasattr(type(self.made), "get_reward"):
            return awaited(self.made.get_reward())
        if self._reward is None:
            return None
        if not hasattr(self.made, self._reward):
            raise ConfigError(f"environment {self._kind}: reward: no attribute {self._reward!r} at its end")
        return getattr(self.made, self._reward)

    def can_pay(self, agents: Sequence[str]) -> bool:
        """Return whether it has a reward, or a method may return a :class:`maporl.types.Result`."""
        pays = hasattr(type(self.made), "get_reward") or self._reward is not None
        return pays or any(may_pay(tool.run) for tool in self._tools)

    def fork(self) -> "TRLEnvironment":
        """Return an environment around what ``_fork`` returned."""
        fork = TRLEnvironment(self.made._fork(), self._reward)
        fork.forks = self.forks
        return fork

    def close(self) -> None:
        """Call ``_close``, and ``close`` if it is not a tool."""
        for name in ("_close", "close"):
            method = getattr(self.made, name, None)
            if callable(method) and name not in {tool.name for tool in self._tools}:
                awaited(method())


def _is_tool(name: str, method: Any) -> bool:
    """Return whether TRL takes a method for a tool. Here, ``close`` without a docstring is not one; TRL refuses it."""
    return not name.startswith("_") and name not in NOT_TOOLS and (name != "close" or bool(inspect.getdoc(method)))


_KNOWN: dict[type, list[Tool]] = {}
"""The tools of each class, because reading a signature takes longer than most calls."""


def _tools_of(made: Any) -> list[Tool]:
    kind = type(made)
    if kind not in _KNOWN:
        # as TRL does, methods are found on the class: a look at an instance would compute its properties
        methods = inspect.getmembers(kind, predicate=inspect.isfunction)
        tools = [Tool.of(getattr(made, name)) for name, method in methods if _is_tool(name, method)]
        _KNOWN[kind] = [replace(tool, run=getattr(kind, tool.name)) for tool in tools]
    return _KNOWN[kind]


def _chosen(reset: Callable[..., Any], columns: Mapping[str, Any], row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the columns that ``reset`` takes by name, or the whole row if it takes any."""
    parameters = list(inspect.signature(reset).parameters.values())
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for p in parameters:
        needed = p.name in named and p.default is p.empty
        if (needed and p.name not in columns) or p.kind is p.POSITIONAL_ONLY:
            raise ConfigError(f"environment {kind}: reset wants {p.name!r}; the questions have {sorted(map(str, row))}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {**row, **{name: columns[name] for name in named if name in columns}}
    return {name: columns[name] for name in named if name in columns}


def _shown(value: Any, name: str) -> Any:
    """Return what a tool returned, as TRL shows it."""
    if isinstance(value, Result):
        return value
    return _text_of(value, name) if isinstance(value, list) else str(value)


def _text_of(blocks: list[Any], where: str) -> str:
    """Return the text of content blocks, or of another list."""
    if not blocks or not all(isinstance(block, dict) and "type" in block for block in blocks):
        return str(blocks)
    kinds = [block["type"] for block in blocks if block["type"] != "text"]
    if kinds:
        raise ConfigError(f"{where} returned content of the type {kinds[0]!r:.40}; only text can be shown")
    return "".join(str(block.get("text", "")) for block in blocks)


def _failed(error: Exception) -> Result:
    """Return an error as TRL shows it to the model."""
    return Result(str({"error": str(error)}), error="raised")
