"""The contracts of tools and environments. Imports no torch, and transformers only to read a function's signature."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from maporl.errors import ConfigError, one_line
from maporl.types import Result
from trl_ext.chat.written_calls import referred
from trl_ext.errors import retold

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What the name of a tool may be, as most chat templates and APIs want it."""


def writable(name: str) -> str:
    """Return a tool's name as models can write it, where a server's name has dots or other signs.

    >>> writable("files.count"), writable("2nd look")
    ('files_count', '_2nd_look')
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return (plain if NAME.match(plain) else f"_{plain}")[:64]


@dataclass(frozen=True)
class Tool:
    """A function that agents may call. It is made once in a process, and several dialogues may call it at the same
    time.

    Args:
        name: the name by which agents call it.
        description: its description in the prompts of agents.
        parameters: a JSON schema of an object with its arguments. Without a ``type``, it has the type ``object``;
            ``{}`` stands for no arguments at all.
        run: the function. It gets the arguments by name, already checked against ``parameters``. It returns text, a
            :class:`maporl.types.Result`, or anything that ``str`` makes readable. A coroutine function is awaited.
            Its exceptions are reported to the agent.
        ordered: whether two calls of one dialogue never run at once. The calls of one utterance then run in their
            order.
        returns: a JSON schema of what it returns, which some chat templates show.

    Raises:
        ConfigError: the name is not one that models can write, or ``parameters`` is not the schema of an object.
    """

    name: str
    description: str
    parameters: dict[str, Any] = field(hash=False)
    run: Callable[..., Any]
    ordered: bool = False
    returns: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self):
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ConfigError(
                f"tool {self.name!r:.80}: its name must have only letters, digits, _ and -, begin with a letter or _, "
                "and have at most 64 characters"
            )
        if isinstance(self.parameters, dict) and "type" not in self.parameters and _of_an_object(self.parameters):
            object.__setattr__(self, "parameters", {"type": "object", "properties": {}, **self.parameters})
        if not isinstance(self.parameters, dict) or self.parameters.get("type") != "object":
            raise ConfigError(
                f'tool {self.name}: expected parameters to be a JSON schema of an object, as {{"type": "object", '
                f'"properties": {{...}}}}, got {self.parameters!r:.80}'
            )

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None, ordered: bool = False) -> "Tool":
        """Return the tool of a typed function or method with a docstring, as TRL and transformers read it.

        The schema is made from the annotations and from a Google-style docstring with a line for each argument.
        ``name`` is by default the function's own.

        Raises:
            ConfigError: the function has no docstring, or an argument lacks its type or its description.
        """
        from transformers.utils import get_json_schema

        called = getattr(function, "__qualname__", None) or repr(function)
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"tool {called}: expected a function, got {type(function).__name__}")
        _check_signature(function, called)
        try:
            schema = get_json_schema(function)["function"]
        except Exception as error:  # it raises several kinds that no module of transformers exports
            raise ConfigError(
                f"tool {called}: {one_line(error, 300)}; give every argument a type, and a line under Args: in "
                "a Google-style docstring"
            ) from None
        return cls(
            name or schema["name"], schema["description"], schema["parameters"], function, ordered, schema.get("return")
        )

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates and APIs take it: ``{"type": "function", "function": {...}}``."""
        returns = {} if self.returns is None else {"return": self.returns}
        function = {"name": self.name, "description": self.description, "parameters": self.parameters, **returns}
        return {"type": "function", "function": function}

    def line(self) -> str:
        """Return the tool as one line of plain text, such as ``add(a: integer, b: integer): Add two numbers.``"""
        properties = _properties(self.parameters)
        arguments = ", ".join(f"{name}: {_kind(one, self.parameters)}" for name, one in properties.items())
        return f"{self.name}({arguments}): {' '.join(self.description.split())}"

    def told(self) -> str:
        """Return :meth:`line`, and below it a line for each argument that has a description: ``  a: the first``."""
        described = [
            f"  {name}: {' '.join(one['description'].split())}"
            for name, one in _properties(self.parameters).items()
            if isinstance(one, dict) and isinstance(one.get("description"), str) and one["description"].strip()
        ]
        return "\n".join([self.line(), *described])


def tool_of(schema: Mapping[str, Any]) -> Tool:
    """Return the tool of ``{"type": "function", "function": {...}}``, which somebody else carries out.

    Raises:
        ConfigError: it has no name that a model can write, or its parameters are not the schema of an object.
    """
    function = schema.get("function", schema)
    parameters = function.get("parameters") or {}
    return Tool(function.get("name", ""), function.get("description") or "", parameters, _elsewhere)


def _elsewhere(**arguments: Any) -> None:
    raise AssertionError("whoever brings a tool to a conversation carries it out")


def _check_signature(function: Callable[..., Any], called: str) -> None:
    """Check what transformers would not name: a missing docstring, and arguments that no caller can give by name."""
    if not inspect.getdoc(function):
        raise ConfigError(f"tool {called}: it has no docstring; write one, with a line under Args: for each argument")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {called}: {parameter}: agents give arguments by name; replace it by named ones")
    # an annotation may be any expression
    with retold(Exception, lambda error: ConfigError(f"tool {called}: its annotations cannot be read: {error}")):
        get_type_hints(function)


MOST_SHOWN = 12
"""Most values and parts of an argument that its type in words names."""


_OF_OBJECTS = ("properties", "$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties", "required")


def _of_an_object(schema: dict[str, Any]) -> bool:
    """Return whether a schema without a ``type`` may be that of arguments."""
    return all(key.startswith("$") or key in ("title", "description") for key in schema) or any(
        key in schema for key in _OF_OBJECTS
    )


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _kind(schema: Any, root: Any, depth: int = 0) -> str:
    """Return the type of an argument in words: ``string or null``, ``one of 'a', 'b'``, ``{row: integer}``."""
    # references are followed inside of ``root``; what is deeper than three of the model's parts has its type alone
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("$ref"), str):
        return _kind(referred(schema["$ref"], root), root, depth + 1) if depth < 4 else "any"
    if isinstance(schema.get("enum"), list):
        return f"one of {_some([repr(value)[:80] for value in schema['enum']])}"
    if "const" in schema:
        return repr(schema["const"])[:80]
    parts = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
    if parts and "type" not in schema:
        words = list(dict.fromkeys(_kind(part, root, depth + 1) for part in parts)) if depth < 4 else ["any"]
        return _some(words, " or ")
    inherited = schema.get("allOf")
    if isinstance(inherited, list) and len(inherited) == 1 and "type" not in schema and depth < 4:
        return _kind(inherited[0], root, depth + 1)
    named = schema.get("type", "object" if _properties(schema) else "any")
    kinds = [named] if isinstance(named, str) else [str(kind) for kind in named] if isinstance(named, list) else ["any"]
    kinds += ["null"] if schema.get("nullable") is True and "null" not in kinds else []
    return " or ".join(_inside(kind, schema, root, depth) for kind in kinds)


def _inside(kind: str, schema: dict[str, Any], root: Any, depth: int) -> str:
    """Return a type in words, with the types of its parts."""
    if kind == "array" and isinstance(schema.get("items"), dict) and depth < 4:
        return f"array of {_kind(schema['items'], root, depth + 1)}"
    properties = _properties(schema)
    if kind == "object" and properties and depth < 4:
        words = [f"{name}: {_kind(part, root, depth + 1)}" for name, part in list(properties.items())[: MOST_SHOWN + 1]]
        return f"{{{_some(words)}}}"
    return kind


def _some(words: list[str], between: str = ", ") -> str:
    return between.join(words if len(words) <= MOST_SHOWN else [*words[:MOST_SHOWN], "..."])


class Toolbox:
    """Several tools that share something which must be closed, such as the process of a server.

    It is made once in a process. A subclass defines :meth:`tools`.
    """

    def tools(self) -> Sequence[Tool]:
        """Return the tools."""
        raise NotImplementedError(f"{type(self).__name__}: a toolbox defines tools()")

    def renew(self) -> None:
        """Hook: called before each update, for example to start a server again that has died."""

    def close(self) -> None:
        """Hook: called once, when the run is over."""


class Environment:
    """A world in which agents act. Each dialogue has its own instance, which one thread at a time uses.

    A subclass defines :meth:`tools`, and overrides what else it needs. A class for TRL's ``environment_factory`` needs
    no base class.

    An exception of a tool's ``run`` is reported to the agent. An exception of :meth:`reset`, :meth:`observe`,
    :meth:`state`, :meth:`over`, :meth:`reward` or :meth:`fork` is a fault of the environment and stops the run.
    :func:`maporl.check_environment` tries them all.

    Attributes:
        forks: how a dialogue in it can be forked. "copy": :meth:`fork` returns an independent equal one. "replay": the
            same seed and the same calls give the same observations, which is checked. "no": it cannot be forked.
        concurrent: whether instances may run at the same time. If not, because they share hidden state, their calls
            take turns.
    """

    forks: Literal["copy", "replay", "no"] = "no"
    concurrent: bool = True

    @property
    def instance(self) -> Any:
        """What reward functions get as the environment: this object, or the one of another library that it wraps."""
        return self

    def reset(self, seed: int, row: Mapping[str, Any]) -> str | dict[str, str] | None:
        """Begin. Return the text that is appended to the first message of those who act here, or the text by agent.

        ``row`` has ``id``, ``question``, ``answer``, ``prompt`` (messages) and every value of the example's ``meta``.
        """
        return None

    def tools(self, agent: str) -> Sequence[Tool]:
        """Return the tools of ``agent``. It is asked before :meth:`reset`, and its answer must not change."""
        raise NotImplementedError(f"{type(self).__name__}: an environment defines tools(agent)")

    def observe(self, agent: str) -> str | None:
        """Return the news for ``agent``, which are appended to what begins its next turn, or None."""
        return None

    def reward(self) -> float | dict[str, float] | None:
        """Return what the dialogue has earned, or what each agent has. It is asked once, at the end."""
        return None

    def can_pay(self, agents: Sequence[str]) -> bool:
        """Return whether it may pay one of ``agents`` anything. A weight on an environment that cannot is an error.

        By default it can if it defines :meth:`reward`, or if a tool of one of them may return a
        :class:`maporl.types.Result`, which may pay (:func:`may_pay`).
        """
        pays = type(self).reward is not Environment.reward
        return pays or any(may_pay(tool.run) for agent in agents for tool in self.tools(agent))

    def state(self) -> str | None:
        """Return the name of the situation, for the column ``state`` of advantages, or None."""
        return None

    def over(self) -> bool:
        """Return whether nothing can be done here any more."""
        return False

    def fork(self) -> "Environment":
        """Return an independent equal environment, if ``forks`` is "copy"."""
        raise NotImplementedError(f"{type(self).__name__}: with forks = 'copy', an environment defines fork()")

    def close(self) -> None:
        """End. It is called exactly once, whatever happened."""

    def abandon(self) -> None:
        """Hook: a call took too long, and nobody waits for it any more. It is called from another thread, before
        :meth:`close`."""


def is_trl_class(made: Any) -> bool:
    """Return whether an object is an instance of a class that TRL takes: it has ``reset``, and does not derive
    from :class:`Environment`. :class:`maporl.integrations.trl.TRLEnvironment` is one around it.

    >>> class Shop:
    ...     def reset(self, **row): ...
    >>> is_trl_class(Shop()), is_trl_class(Environment()), is_trl_class(3)
    (True, False, False)
    """
    return not isinstance(made, Environment) and inspect.isfunction(getattr(type(made), "reset", None))


class EnvironmentLost(Exception):
    """An environment cannot answer any more.

    What raises it in ``reward`` is lost: its dialogue is left out of the update.
    """


class CallRefused(Exception):
    """A call cannot be carried out. The agent is told the message.

    Args:
        kind: the :data:`maporl.types.CallError`.
        message: what the agent is told.
    """

    def __init__(self, kind: Any, message: str):
        super().__init__(message)
        self.kind = kind


def may_pay(run: Callable[..., Any]) -> bool:
    """Return whether a tool's function may return a :class:`maporl.types.Result`.

    It cannot if it is annotated to return something else and its code does not name ``Result``.

    >>> def look() -> str: ...
    >>> def act() -> Result | str: ...
    >>> def earn() -> str: return Result("earned", reward=1.0)
    >>> may_pay(look), may_pay(act), may_pay(earn), may_pay(lambda: 1)
    (False, True, True, True)
    """
    while isinstance(run, partial):
        run = run.func
    try:
        returns = get_type_hints(run).get("return", Any)
        used = inspect.getclosurevars(inspect.unwrap(run))
    except Exception:  # an annotation may be any expression, and some callables have neither annotations nor code
        return True
    if Result in [*used.globals.values(), *used.nonlocals.values()] or Result.__name__ in used.unbound:
        return True
    return any(one is Any or not isinstance(one, type) or issubclass(one, Result) for one in _plain_types(returns))


def _plain_types(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation without parameters: of ``list[int] | None`` list and NoneType."""
    if get_origin(annotation) in (Union, UnionType):
        return [one for part in get_args(annotation) for one in _plain_types(part)]
    return [type(None) if annotation is None else get_origin(annotation) or annotation]


def as_result(value: Any) -> Result:
    """Return what a tool returned as a :class:`maporl.types.Result`. None reads "done"."""
    if isinstance(value, Result):
        return value
    if value is None:
        return Result("done")
    if isinstance(value, bytes | bytearray):
        return Result(bytes(value).decode("utf-8", "replace"))
    return Result(str(value))
