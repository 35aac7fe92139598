"""Check the tools and environments of a configuration: build them all, and open and close one environment of each."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from maporl.environments.base import Tool
from maporl.environments.build import TeamTools, ToolGrant, build_grants
from maporl.environments.rooms import Rooms
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import Fault, refused
from maporl.rewards.rules import weighed
from maporl.rollout.agent_tools import agent_tools, grant_faults, typed
from maporl.run import ResolvedRun
from maporl.team.agents import Voice
from maporl.team.loading import context_length, load_tokenizers
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import Tokenizer, encode_prompt

LATER = ("fork_random", "fork_every", "best_of")
"""The branchings that fork dialogues in which something was said."""


class OfferedTools:
    """The tools and environments of a run, and what each agent may call of them, before a model is loaded.

    Args:
        run: the run.
    """

    def __init__(self, run: ResolvedRun):
        self.run = run

    @cached_property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizers of the agents that have weights."""
        return load_tokenizers(self.run.config)

    @cached_property
    def team(self) -> TeamTools:
        """The world, and what each agent is given."""
        return self.run.open_tools()

    @property
    def world(self) -> World:
        """The tools and environments."""
        return self.team.world

    @cached_property
    def grants(self) -> dict[str, ToolGrant]:
        """What each agent that may call something is given."""
        protocol, playing = self.run.protocol, self.run.speakers
        grants = build_grants(self.team.grants, self.world, protocol.acts_in)
        callers = [agent for agent in playing if agent in grants or protocol.tools(agent, playing)]
        return {agent: grants.get(agent) or self.team.grants[agent] for agent in callers}

    @cached_property
    def may_call(self) -> dict[str, AgentTools]:
        """What each agent may call. Agents that may call nothing are left out.

        Raises:
            ConfigError: a call format does not suit the tools or the chat template, or as :meth:`faults` says.
        """
        return {agent: self._of_agent(agent) for agent in self.grants}

    def _of_agent(self, agent: str) -> AgentTools:
        config, tokenizer = self.run.config, self.tokenizers.get(agent)
        section = config.agents[agent]
        voice = None if tokenizer is None else Voice(agent, tokenizer, context_length(agent, section))
        longest = self.run.sampling.longest(agent, config.ppo.response_length)
        tools = agent_tools(agent, self.grants[agent], self.world, voice, longest, self._handed(agent))
        return typed(tools) if section.engine == "human" else tools

    def _handed(self, agent: str) -> Sequence[Tool]:
        return self.run.protocol.tools(agent, self.run.speakers)

    def faults(self) -> Iterator[Fault]:
        """Yield tools, environments and call formats that cannot be used.

        Each environment is begun once on the first question of the training split.

        Raises:
            ConfigError: a tool or an environment cannot be made, or does not begin.
        """
        config, protocol, world = self.run.config, self.run.protocol, self.world
        try:
            protocol.check_tools(world.tools)
        except ValueError as error:
            yield Fault.of(ValueError(f"protocol.{error}"))
        yield from world.offers.unpaid(weighed(config.reward))
        for agent, grant in self.grants.items():
            ungranted = list(grant_faults(agent, grant, world, self._handed(agent)))
            yield from ungranted or refused(partial(self._of_agent, agent))
        for name in world.environments:
            yield from _forks(config.branching.how, name, world.offers.forks(name))
        rooms = Rooms(self.run.task[0], ("check",), [{"role": "user", "content": self.run.task[0].question}])
        try:
            world.begin([rooms])
        finally:
            world.drop_all()

    def lines(self) -> list[str]:
        """Return a line for each agent that may call something, for each environment that does not belong to all, and
        for what nobody uses."""
        config, world = self.run.config, self.world
        lines = []
        for agent, tools in self.may_call.items():
            tokenizer = self.tokenizers.get(agent)
            cost = "" if tokenizer is None else f", {_tokens(tools, tokenizer)} tokens of its first prompt"
            lines.append(f"tools: {agent} may call {', '.join(tools.checks)} ({tools.format.name}{cost})")
        called = {name for tools in self.may_call.values() for name in tools.checks} | self.run.protocol.uses_tools
        shared = [name for name, spec in world.environments.items() if set(spec.agents) == set(self.run.speakers)]
        return [
            *lines,
            *(
                f"environments.{name}: belongs to {', '.join(spec.agents)}; nobody else is told of it or paid by it"
                for name, spec in world.environments.items()
                if spec.agents and name not in shared
            ),
            *(
                f"warning: tools.{name}: no agent may call it, and protocol {config.protocol.get('name')} does not"
                for name in world.tools
                if name not in called
            ),
            *(
                f"warning: environments.{name}: no agent acts in it or hears of it, because its agents are []; list "
                "some, or remove it"
                for name, spec in world.environments.items()
                if not spec.agents
            ),
        ]


def _tokens(tools: AgentTools, tokenizer: Tokenizer) -> int:
    """Return how many tokens of an agent's first prompt tell it of its tools."""
    if (schemas := tools.format.schemas()) is not None:
        hello = [{"role": "user", "content": "."}]
        return len(encode_prompt(tokenizer, hello, schemas)) - len(encode_prompt(tokenizer, hello))
    return len(encode_words(tokenizer, tools.format.intro() or ""))


def _forks(how: str, name: str, forks: str) -> Iterator[Fault]:
    """Yield why the branching ``how`` cannot fork dialogues in the environment ``name``."""
    if how in LATER and forks == "no":
        what = f"{how} forks dialogues, and environment {name!r} can be neither copied nor replayed"
        replay = f"environments.{name}.forks: replay if reset(seed) decides everything in it"
        yield Fault("branching.how", what, f"use how: independent or fork_first, or set {replay}")
    if how == "fork_random" and forks == "copy":
        what = f"fork_random forks dialogues at earlier steps, and a copy of environment {name!r} is as it is now"
        remedy = f"set environments.{name}.forks: replay if reset(seed) decides everything in it, or use fork_every"
        yield Fault("branching.how", what, remedy)
