"""Build the tools and environments of a run. Imports no torch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from maporl.config.call_options import CallLimits, CallTexts
from maporl.config.faults import explain
from maporl.config.imports import extension, kind_of, look_up, told
from maporl.config.schema import Config, EnvironmentSection
from maporl.environments import ENVIRONMENTS, TOOLS
from maporl.environments.base import Environment, Tool, Toolbox, is_trl_class
from maporl.environments.rooms import EnvironmentSpec
from maporl.environments.world import World
from maporl.errors import ConfigError, refuse, refused


@dataclass(frozen=True)
class ToolGrant:
    """The tools of one agent.

    Args:
        tools: the names of tools, of environments (all of their tools), or ``ENVIRONMENT.TOOL``.
        call_format: a name of ``CALL_FORMATS``, or "auto".
        limits: how much it may call.
        texts: the texts of the plain call formats.
    """

    tools: tuple[str, ...] = ()
    call_format: Literal["auto", "native", "json", "tags", "typed"] = "auto"
    limits: CallLimits = field(default_factory=CallLimits)
    texts: CallTexts = field(default_factory=CallTexts)


@dataclass(frozen=True)
class TeamTools:
    """The tools and environments of a run, and what each agent is given of them."""

    world: World = field(default_factory=World)
    grants: Mapping[str, ToolGrant] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config, speakers: Sequence[str], acts_in: frozenset[str] = frozenset()) -> "TeamTools":
        """Return those of a configuration.

        ``speakers`` are the agents that play, and ``acts_in`` are the names of the environments in which the protocol
        acts for them.

        Raises:
            ConfigError: a tool or an environment does not exist or cannot be made, or an environment is for an agent
                that does not play.
        """
        named = {name: config.agents[name].tools for name in speakers}
        tools: dict[str, Tool] = {}
        boxes: list[Toolbox] = []
        seconds: dict[str, float] = {}
        groups: dict[str, list[str]] = {}
        specs: dict[str, EnvironmentSpec] = {}

        def add_tools(name: str) -> None:
            section, where = config.tools[name], f"tools.{name}"
            made = _made(section.use, TOOLS, section.options, where)
            if isinstance(made, Toolbox):
                boxes.append(made)
            offered = tools_of(made, name, where)
            groups[name] = [tool.name for tool in offered]
            for tool in offered:
                if tool.name in tools or tool.name in config.environments:
                    raise ConfigError(f"{where}: its tool {tool.name!r} has the name of another tool or environment")
                tools[tool.name] = tool
                if section.seconds is not None:
                    seconds[tool.name] = section.seconds

        def add_environment(name: str) -> None:
            options = config.environments[name]
            part = look_up(options.use, ENVIRONMENTS, f"environments.{name}.use")
            specs[name] = environment_spec(name, part, options, speakers, owners(name, named, acts_in))
            if options.isolate == "process":
                from maporl.environments.isolated import Host, IsolatedEnvironment  # processes that few need

                host = Host(name, options)
                boxes.append(host)
                specs[name] = replace(specs[name], make=partial(IsolatedEnvironment, host))

        every = [(add_tools, name) for name in config.tools]
        every += [(add_environment, name) for name in config.environments]
        refuse(fault for add, name in every for fault in refused(partial(add, name)))
        grants = {
            name: ToolGrant(
                tuple(agent.tools), agent.call_format, agent.limits or CallLimits(), agent.call_texts or CallTexts()
            )
            for name, agent in config.agents.items()
            if name in speakers
        }
        return cls(World(tools, specs, boxes, seconds, groups), grants)

    @classmethod
    def of(
        cls,
        tools: Mapping[str, Sequence[Any]] | None,
        environments: Mapping[str, Any] | None,
        speakers: Sequence[str],
        acts_in: frozenset[str] = frozenset(),
    ) -> "TeamTools":
        """Return those of a program.

        Args:
            tools: for each agent, typed functions, tools, toolboxes, and names of environments or ``ENVIRONMENT.TOOL``.
            environments: by name, a class or a function that makes an instance.
            speakers: the agents that play.
            acts_in: the names of the environments in which the protocol acts for the agents.

        Raises:
            ConfigError: an agent does not play, or one of these is something else.
        """
        all_tools: dict[str, Tool] = {}
        boxes: list[Toolbox] = []
        grants = {name: ToolGrant() for name in speakers}
        for agent, entries in (tools or {}).items():
            where = f"tools: agent {agent!r}"
            if agent not in grants:
                raise ConfigError(f"{where} does not play; the agents are {list(speakers)}")
            names = []
            for one in entries:
                if isinstance(one, str):
                    names.append(one)
                    continue
                if isinstance(one, Toolbox) and not any(one is box for box in boxes):
                    boxes.append(one)
                for tool in tools_of(one, None, where):
                    if all_tools.setdefault(tool.name, tool).run != tool.run:
                        raise ConfigError(f"{where}: another tool is called {tool.name!r} too; rename one of them")
                    names.append(tool.name)
            grants[agent] = ToolGrant(tuple(names))
        named = {name: grant.tools for name, grant in grants.items()}
        specs = {
            name: environment_spec(name, part, EnvironmentSection(use=name), speakers, owners(name, named, acts_in))
            for name, part in (environments or {}).items()
        }
        return cls(World(all_tools, specs, boxes), grants)


def tools_of(made: Any, name: str | None, where: str) -> list[Tool]:
    """Return the tools of what a section or a program gives: a tool, a toolbox, or a typed function.

    ``name`` is the name of a function's tool, by default the function's own.

    Raises:
        ConfigError: it is something else, or a function whose schema cannot be made.
    """
    if isinstance(made, Tool):
        return [made]
    if isinstance(made, Toolbox):
        return list(made.tools())
    if callable(made) and not isinstance(made, type):
        return [Tool.of(made, name)]
    raise ConfigError(f"{where}: expected a typed function, a maporl.Tool or a maporl.Toolbox, got {kind_of(made)}")


def _made(use: str, registry: Mapping[str, Any], options: Mapping[str, Any], where: str) -> Any:
    """Return the object that ``use`` names: of the registry and of classes, what it makes with ``options``."""
    part = look_up(use, registry, f"{where}.use")
    if isinstance(part, Tool | Toolbox):
        _no_options(options, where)
        return part
    if use not in registry and inspect.isroutine(part) and not options and not _makes_tools(part):
        return part  # the function is the tool itself
    options = fitted(part, options, f"{where}.options")
    try:
        return part(**options)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"{where}.options: {told(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{where}.options: {error}") from None


def fitted(part: Any, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``options`` with the types that the class or function ``part`` gives its parameters.

    A parameter without a type, or with one of the user's own that no configuration can write, takes what is given.

    Raises:
        ConfigError: a value has another type. The message begins with ``where`` and names the option.
    """
    typed = part.__init__ if isinstance(part, type) else part  # type: ignore[misc]  # that of the class itself
    try:
        hints = get_type_hints(typed)
    except (NameError, TypeError, AttributeError, SyntaxError):  # a type that is only imported for checkers, or none
        hints = {}
    converted = dict(options)
    for name in options.keys() & hints.keys():
        try:
            adapter: TypeAdapter = TypeAdapter(hints[name])
        except PydanticUserError:
            continue
        try:
            converted[name] = adapter.validate_python(options[name])
        except ValidationError as error:
            faults = [{**fault, "loc": (name, *fault["loc"])} for fault in error.errors()]
            raise ConfigError(f"{where}.{explain(dict, faults)[0]}") from None
    return converted


def _makes_tools(function: Any) -> bool:
    """Return whether a function says that it returns a tool or a toolbox."""
    returns = inspect.signature(function).return_annotation
    return returns in (Tool, Toolbox) or returns in ("Tool", "Toolbox")


def _no_options(options: Mapping[str, Any], where: str) -> None:
    if options:
        raise ConfigError(f"{where}.options: it takes no options, got {list(options)}; remove them")


def owners(name: str, tools: Mapping[str, Sequence[str]], acts_in: frozenset[str]) -> tuple[str, ...]:
    """Return the agents to which the environment ``name`` belongs, if its section does not list them.

    They are the agents whose ``tools`` name it, or one of its tools. It belongs to all agents if nobody names it, or if
    the protocol acts in it for them (``acts_in``).

    >>> tools = {"ann": ["add"], "bob": ["shop.buy"]}
    >>> owners("shop", tools, frozenset()), owners("bank", tools, frozenset()), owners("shop", tools, frozenset({"shop"}))
    (('bob',), ('ann', 'bob'), ('ann', 'bob'))
    """  # noqa: E501
    agents = tuple(agent for agent, names in tools.items() if name in {tool.partition(".")[0] for tool in names})
    return tuple(tools) if name in acts_in or not agents else agents


def environment_spec(
    name: str, part: Any, section: EnvironmentSection, speakers: Sequence[str], belongs_to: Sequence[str] = ()
) -> EnvironmentSpec:
    """Return the environment ``name`` of a run, made by ``part``: a class or a function.

    ``belongs_to`` are its agents, if the section does not list them.

    Raises:
        ConfigError: ``part`` cannot be called, or an agent of the section does not play.
    """
    where = f"environments.{name}"
    if not callable(part):
        raise ConfigError(f"{where}.use: expected a class or a function that makes an environment, got {kind_of(part)}")
    agents = tuple(belongs_to if section.agents is None else section.agents)
    unknown_agents = [agent for agent in agents if agent not in speakers]
    if unknown_agents:
        raise ConfigError(f"{where}.agents: agent {unknown_agents[0]!r} does not play; the agents are {list(speakers)}")
    options = fitted(part, section.options, f"{where}.options")
    return EnvironmentSpec(name, _maker(part, replace(section, options=options), where), agents, section, part)


def build_grants(
    agents: Mapping[str, ToolGrant], world: World, acts_in: frozenset[str] = frozenset()
) -> dict[str, ToolGrant]:
    """Return what each agent is given. Agents that are given nothing are left out.

    All agents of an environment have all of its tools, unless the tools of an agent name it, or the protocol acts in it
    for them (``acts_in``).
    """
    named = acts_in | {name.partition(".")[0] for grant in agents.values() for name in grant.tools}
    grants = {}
    for agent, grant in agents.items():
        shared = [name for name, spec in world.environments.items() if name not in named and agent in spec.agents]
        tools = (*grant.tools, *(name for name in shared if world.offers.tools_of(name, agent)))
        if tools:
            grants[agent] = replace(grant, tools=tools)
    return grants


def _maker(part: Callable[..., Any], section: EnvironmentSection, where: str) -> Callable[[], Environment]:
    def make() -> Environment:
        made = part(**section.options)
        if is_trl_class(made):
            made = extension("maporl.integrations.trl:TRLEnvironment", f"{where}.use")(made, section.reward)
        elif section.reward is not None:
            raise ConfigError(f"{where}.reward: only a class written for TRL has it; remove it")
        if not isinstance(made, Environment):
            raise ConfigError(f"{where}.use: expected a maporl.Environment, or a class as for TRL, got {kind_of(made)}")
        if section.forks is not None:
            made.forks = section.forks
        return made

    return make
