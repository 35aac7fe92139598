"""Build the engines that answer for a team."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maporl.config.engines import ENGINES
from maporl.config.imports import extension
from maporl.engines.base import Engine
from maporl.errors import ConfigError
from maporl.team.agents import Policy
from trl_ext.ppo.options import PPOOptions


@dataclass(frozen=True)
class EngineSetup:
    """The arguments of an engine's ``build``.

    Args:
        options: for each agent of the engine, its section of the configuration (:class:`EngineEntry.section`), or its
            ``engine_options`` if the engine has no section.
        policies: the policies that speak for these agents, by name.
        sampling: the temperature, the longest completion and the batch sizes.
        folder: the run's output folder, for files that the engine writes.
    """

    options: Mapping[str, Any]
    policies: Mapping[str, Policy]
    sampling: PPOOptions
    folder: Path


def build_engines(
    agents: Mapping[str, str],
    options: Mapping[str, Any],
    policies: Mapping[str, Policy],
    sampling: PPOOptions,
    folder: Path,
) -> dict[str, Engine]:
    """Build the engines of ``agents``, which maps each agent to the name of its engine. Return them by name.

    The other arguments are those of :class:`EngineSetup`.

    Raises:
        ConfigError: an engine's name is unknown, or a package that it needs is not installed.
    """
    engines: dict[str, Engine] = {}
    for name in dict.fromkeys(agents.values()):
        if name not in ENGINES:
            raise ConfigError(f"engine {name!r}: expected {' or '.join(ENGINES)}, or engines={{{name!r}: ...}}")
        speaking = {agent for agent, engine in agents.items() if engine == name}
        served = {policy.name: policy for policy in policies.values() if speaking & set(policy.agents)}
        setup = EngineSetup({agent: options.get(agent) for agent in speaking}, served, sampling, folder)
        engines[name] = extension(f"{ENGINES[name].module}:build", f"engine {name!r}")(setup)
    return engines
