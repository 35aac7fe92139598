"""What engines can do of the sampling that a configuration gives to agents and roles. Imports no torch."""

from maporl.config import Config
from maporl.config.engines import ENGINES
from maporl.config.imports import unknown
from maporl.decoding import Sampling, check_learners
from maporl.errors import ConfigError
from maporl.run import ResolvedRun


def check_sampling(run: ResolvedRun) -> None:
    """Check that agents and roles that have a sampling exist, and that their engines can do it.

    Raises:
        ConfigError: something is wrong. The message names the first fault.
    """
    config, protocol, sampling, where = run.config, run.protocol, run.sampling, run.where
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
    check_learners(sampling, run.learners, protocol.roles, f"{where}: ")


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
