"""Check the tools and environments of a configuration: build them all, and open and close one environment of each."""

from collections.abc import Mapping

from maporl.config.schema import Config
from maporl.environments.build import build_grants
from maporl.environments.rooms import Rooms
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.rewards.rules import weighed
from maporl.rollout.agent_tools import agent_tools, typed
from maporl.run import ResolvedRun
from maporl.team.agents import Voice
from maporl.team.loading import context_length
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import Tokenizer, encode_prompt

LATER = ("fork_random", "fork_every", "best_of")
"""The branchings that fork dialogues in which something was said."""


def check_tools(
    run: ResolvedRun, tokenizers: Mapping[str, Tokenizer]
) -> tuple[World, dict[str, AgentTools], list[str]]:
    """Build the tools and environments, and begin each environment once on the first question of the training split.

    Returns:
        The world, what each agent may call, and a line for each agent that may call something, and for each environment
        that does not belong to all.

    Raises:
        ConfigError: a tool, an environment or a call format cannot be used.
    """
    config, protocol, playing, example = run.config, run.protocol, run.speakers, run.task[0]
    built = run.open_tools()
    world = built.world
    try:
        protocol.check_tools(world.tools)
    except ValueError as error:
        raise ConfigError(f"protocol.{error}") from None
    world.offers.must_pay(weighed(config.reward))
    grants = build_grants(built.grants, world, protocol.acts_in)
    may_call, lines = {}, []
    for agent in playing:
        handed = protocol.tools(agent, playing)
        if agent not in grants and not handed:
            continue
        grant = grants.get(agent) or built.grants[agent]
        tokenizer = tokenizers.get(agent)
        voice = Voice(agent, tokenizer, context_length(agent, config.agents[agent])) if tokenizer is not None else None
        longest = run.sampling.longest(agent, config.ppo.response_length)
        may_call[agent] = agent_tools(agent, grant, world, voice, longest, handed)
        if config.agents[agent].engine == "human":
            may_call[agent] = typed(may_call[agent])
        cost = "" if tokenizer is None else f", {_tokens(may_call[agent], tokenizer)} tokens of its first prompt"
        names = ", ".join(may_call[agent].checks)
        lines.append(f"tools: {agent} may call {names} ({may_call[agent].format.name}{cost})")
    for name in world.environments:
        _check_forks(config, world, name)
    rooms = Rooms(example, ("check",), [{"role": "user", "content": example.question}])
    try:
        world.begin([rooms])
    finally:
        world.drop_all()
    unused = [
        f"warning: tools.{name}: no agent may call it, and protocol {config.protocol.get('name')} does not"
        for name, tool in world.tools.items()
        if not any(name in entry.checks for entry in may_call.values()) and name not in protocol.uses_tools
    ]
    idle = [
        f"warning: environments.{name}: no agent acts in it or hears of it, because its agents are []; list some, or "
        "remove it"
        for name, spec in world.environments.items()
        if not spec.agents
    ]
    whose = [
        f"environments.{name}: belongs to {', '.join(spec.agents)}; nobody else is told of it or paid by it"
        for name, spec in world.environments.items()
        if spec.agents and set(spec.agents) != set(playing)
    ]
    return world, may_call, [*lines, *whose, *unused, *idle]


def _tokens(tools: AgentTools, tokenizer: Tokenizer) -> int:
    """Return how many tokens of an agent's first prompt tell it of its tools."""
    if (schemas := tools.format.schemas()) is not None:
        hello = [{"role": "user", "content": "."}]
        return len(encode_prompt(tokenizer, hello, schemas)) - len(encode_prompt(tokenizer, hello))
    return len(encode_words(tokenizer, tools.format.intro() or ""))


def _check_forks(config: Config, world: World, name: str) -> None:
    """Check that an environment can be forked where the branching forks dialogues."""
    if config.branching.how in LATER and world.offers.forks(name) == "no":
        raise ConfigError(
            f"branching.how: {config.branching.how} forks dialogues, and environment {name!r} can be neither copied "
            "nor replayed; use how: independent or fork_first, or, if reset(seed) decides everything in it, set "
            f"environments.{name}.forks: replay"
        )
    if config.branching.how == "fork_random" and world.offers.forks(name) == "copy":
        raise ConfigError(
            f"branching.how: fork_random forks dialogues at earlier steps, and a copy of environment {name!r} is as it "
            f"is now; set environments.{name}.forks: replay if reset(seed) decides everything in it, or use fork_every"
        )
