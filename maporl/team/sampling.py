"""How a configuration's agents are sampled, and what their engines can do of it. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from maporl.config import Config, validated
from maporl.config.engines import ENGINES
from maporl.config.imports import unknown
from maporl.decoding import Sampling, TeamSampling, check_learners
from maporl.errors import ConfigError
from maporl.protocols import Protocol, speakers


def role_sampling(section: Mapping[str, Any], where: str = "configuration") -> dict[str, Sampling]:
    """Return the sampling of each role that ``protocol.sampling`` names.

    Raises:
        ConfigError: it is not a mapping of roles, or a value is wrong. ``where`` begins the message.
    """
    given = section.get("sampling") or {}
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise ConfigError(
            f"{where}: protocol.sampling: expected roles with their values, as {{solver: {{temperature: 0.7}}}}, got {given!r:.80}"
        )
    return {
        str(role): validated(Sampling, dict(own), f"{where}: protocol.sampling.{role}") for role, own in given.items()
    }


def team_sampling(config: Config, where: str = "configuration") -> TeamSampling:
    """Return how the team of ``config`` is sampled, where this differs from the run.

    Raises:
        ConfigError: ``protocol.sampling`` is wrong.
    """
    agents = {name: agent.sampling for name, agent in config.agents.items() if agent.sampling is not None}
    return TeamSampling(agents, role_sampling(config.protocol, where), dict(config.evaluation.sampling))


def learners_of(config: Config) -> dict[str, str | None]:
    """Return the agents that play and are trained, with their own roles."""
    playing = speakers(config.protocol, tuple(config.agents))
    agents = {name: config.agents[name] for name in playing}
    return {name: agent.role for name, agent in agents.items() if agent.trainable and agent.weights}


def check_sampling(config: Config, protocol: Protocol, where: str) -> None:
    """Check that agents and roles that have a sampling exist, and that their engines can do it.

    Raises:
        ConfigError: something is wrong. The message begins with ``where`` and names the first fault.
    """
    sampling = team_sampling(config, where)
    for name in sampling.held_out:
        if name not in config.agents:
            raise ConfigError(f"{where}: evaluation.sampling: {unknown(name, config.agents)}")
    roles = {agent.role for agent in config.agents.values()}
    for role in sampling.roles:
        if role not in roles and not protocol.roles:
            known = sorted(one for one in roles if one is not None)
            raise ConfigError(
                f"{where}: protocol.sampling.{role}: nobody speaks in this role; agents have the roles {known}, so set "
                f"agents.NAME.role: {role}, or agents.NAME.sampling"
            )
    for name in config.agents:
        places = {f"agents.{name}.sampling": sampling.agents.get(name)}
        places[f"evaluation.sampling.{name}"] = sampling.held_out.get(name)
        for place, own in places.items():
            if own is not None:
                _check_engine(name, own, config, f"{where}: {place}")
    check_learners(sampling, learners_of(config), protocol.roles, f"{where}: ")


def _check_engine(name: str, own: Sampling, config: Config, where: str) -> None:
    """Check that the engine of agent ``name`` can sample as ``own`` says. ``where`` names the place."""
    agent = config.agents[name]
    entry = ENGINES[agent.engine]
    if not entry.samples:
        raise ConfigError(f"{where}: engine {agent.engine!r} samples nothing; remove it")
    if not entry.top_k and any(own.every("top_k")):
        raise ConfigError(f"{where}.top_k: the interface of engine {agent.engine!r} has no top_k; use top_p")
    for key in ("temperature", "max_tokens"):
        if agent.api is not None and getattr(agent.api, key) is not None and own.every(key):
            raise ConfigError(
                f"{where}.{key}: agents.{name}.api.{key} is set too, and it would win; remove one of them"
            )
