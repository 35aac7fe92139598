"""What each agent of a team may call: its tools, its call format, and what its tokenizer makes of results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from maporl.config.imports import unknown
from maporl.decoding import TeamSampling
from maporl.environments.arguments import ArgumentCheck
from maporl.environments.base import Tool, tool_of, writable
from maporl.environments.build import TeamTools, ToolGrant, build_grants
from maporl.environments.calls import CallFormat, TypedFormat, build_format
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import Fault, refuse
from maporl.protocols.base import Protocol
from maporl.team.agents import Voice
from maporl.team.team import Team
from maporl.types import Message, Utterance
from trl_ext.chat.encoding import encode_continuation
from trl_ext.chat.tool_calls import NativeCalls

MARGIN = 256
"""More characters than a chat template writes around a few messages."""


def agent_tools(
    agent: str,
    grant: ToolGrant,
    world: World,
    voice: Voice | None,
    longest: int,
    handed: Sequence[Tool] = (),
) -> AgentTools:
    """Return what an agent may call.

    Args:
        agent: the agent's name.
        grant: what it is given.
        world: the tools and environments of the run.
        voice: the agent's tokenizer, or None if its engine has none.
        longest: the most tokens of its completions.
        handed: the tools whose calls the protocol answers itself.

    Raises:
        ConfigError: a tool does not exist, two have the same name, a schema is not valid, or the call format does not
            suit the tools or the chat template.
    """
    refuse(grant_faults(agent, grant, world, handed))
    granted = _granted(agent, grant, world, handed)
    tools = [tool for tool, _ in granted]
    checks = {tool.name: ArgumentCheck(tool) for tool in tools}
    native = (lambda: None) if voice is None else (lambda: NativeCalls.of(voice.tokenizer))
    form = build_format(grant.call_format, tools, grant.texts, native, f"agents.{agent}", grant.limits.parallel)
    places = {tool.name: place for tool, place in granted}
    reader = _Reader(voice, longest, form.heard)
    names = frozenset(tool.name for tool in handed)
    return AgentTools(form, checks, places, grant.limits, reader.cut, names, reader.room)


def tools_of_team(
    tools: TeamTools,
    team: Team,
    longest: int,
    protocol: Protocol,
    speakers: Sequence[str],
    sampling: TeamSampling | None = None,
) -> dict[str, AgentTools]:
    """Return what each agent of a team may call. Agents that may call nothing are left out.

    ``longest`` is the most tokens of a completion, unless ``sampling`` has another length for an agent. ``speakers``
    are the agents that play ``protocol``.

    Raises:
        ConfigError: as for :func:`agent_tools`.
    """
    grants = build_grants(tools.grants, tools.world, protocol.acts_in)
    may_call = {}
    for name in speakers:
        handed = protocol.tools(name, tuple(speakers))
        if name in grants or handed:
            grant = grants.get(name) or tools.grants.get(name) or ToolGrant()
            most = longest if sampling is None else sampling.longest(name, longest)
            may_call[name] = agent_tools(name, grant, tools.world, team.voice_of(name), most, handed)
    return may_call | {name: typed(entry) for name, entry in may_call.items() if team.agents[name].engine == "human"}


def formats_of_schemas(
    agent: str, voice: Voice | None, grants: Mapping[str, ToolGrant]
) -> Callable[[tuple[dict[str, Any], ...]], CallFormat]:
    """Return what makes the call format of an agent for the tools that a protocol brings to a conversation."""
    grant = grants.get(agent) or ToolGrant()
    native = cache(lambda: None if voice is None else NativeCalls.of(voice.tokenizer))

    def form(schemas: tuple[dict[str, Any], ...]) -> CallFormat:
        tools = [tool_of(schema) for schema in schemas]
        return build_format(grant.call_format, tools, grant.texts, native, f"agents.{agent}", grant.limits.parallel)

    return form


def grant_faults(agent: str, grant: ToolGrant, world: World, handed: Sequence[Tool] = ()) -> Iterator[Fault]:
    """Yield the names in ``grant`` that mean no tool of ``agent``, and names that two tools have."""
    for name in grant.tools:
        if isinstance(named := _named(agent, name, world), Fault):
            yield named
    names = [tool.name for tool, _ in _granted(agent, grant, world, handed)]
    for name in dict.fromkeys(name for number, name in enumerate(names) if name in names[:number]):
        yield Fault(f"agents.{agent}.tools", f"it has two tools called {name!r}", "rename one of them")


def _granted(agent: str, grant: ToolGrant, world: World, handed: Sequence[Tool]) -> list[tuple[Tool, str | None]]:
    """Return the tools of an agent, each with its environment."""
    named = (_named(agent, name, world) for name in grant.tools)
    granted = [entry for entries in named if not isinstance(entries, Fault) for entry in entries]
    return [*granted, *((tool, None) for tool in handed)]


def _named(agent: str, name: str, world: World) -> list[tuple[Tool, str | None]] | Fault:
    """Return the tools that a name means, each with its environment, or why it means none."""
    place, _, one = name.partition(".")
    key = f"agents.{agent}.tools"
    if name in world.tools:
        return [(world.tools[name], None)]
    if place in world.groups:
        offered = {n: world.tools[n] for n in world.groups[place]}
    elif place in world.environments:
        owners = world.environments[place].agents
        if agent not in owners:
            what = f"environment {place!r} is for {list(owners)}"
            return Fault(key, what, f"add {agent!r} to environments.{place}.agents")
        offered = {tool.name: tool for tool in world.offers.tools_of(place, agent)}
    else:
        choices = {*world.tools, *world.groups, *world.environments}  # one tool may be a section of its name
        return Fault(key, unknown(name, choices), "add it under tools: or environments:")
    one = one if not one or one in offered else writable(one)
    if one and one not in offered:
        return Fault(f"{key}: {name}", unknown(one, offered))
    return [(offered[n], place if place not in world.groups else None) for n in ([one] if one else offered)]


def typed(tools: AgentTools) -> AgentTools:
    """Return an agent's ``tools`` for a person who types the calls."""
    return replace(tools, format=TypedFormat(list(tools.format.tools.values()), tools.format.texts))


class _Reader:
    """Counts results in the tokens of the agent that is shown them."""

    def __init__(self, voice: Voice | None, longest: int, heard: Callable[[list[Message]], list[Message]]):
        self.voice, self.longest, self.heard = voice, longest, heard

    def cut(self, text: str, most: int) -> tuple[str, int]:
        """Return the first ``most`` tokens of ``text`` as text, and the number of the others.

        An agent without a tokenizer has four characters to a token.
        """
        if self.voice is None or not self.voice.tokenizer.is_fast:
            return text[: 4 * most], max(0, -(-len(text) // 4) - most)
        if len(text) <= most:  # a token has at least one character
            return text, 0
        places = self.voice.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(places) <= most:
            return text, 0
        return text[: places[most - 1][1] if most else 0], len(places) - most

    def room(self, segment: Utterance, messages: list[Message]) -> int | None:
        """Return how many tokens of the context are left after the next completion, if ``messages`` come before it."""
        if self.voice is None or self.voice.context is None or not segment.prompt_ids:
            return None
        before = len(segment.prompt_ids) + len(segment.response_ids)
        left = self.voice.context - self.longest - before
        shown = self.heard(messages)
        characters = sum(len(message["content"].encode()) for message in shown)
        if characters + MARGIN <= left:  # no byte makes more than one token
            return left - characters - MARGIN
        last, stops = segment.response_ids[-1], self.voice.stop_ids
        return left - len(encode_continuation(self.voice.tokenizer, shown, last if last in stops else None, stops))
