"""Building the engines that a team speaks through."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from maporl.config.engines import ENGINES
from maporl.engines.base import Engine
from maporl.errors import ConfigError
from maporl.team.agents import Policy
from trl_ext.ppo_options import PPOOptions


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is built from.

    Args:
        options: for each agent that speaks through it, its section of the configuration (:class:`EngineEntry.section`) or, where
            it has none, its ``engine_options``.
        policies: the policies that speak for these agents, by name.
        sampling: temperature, longest answer, batch sizes.
        folder: the run's output folder, for what it has to write.
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
    """The engines that ``agents`` (name -> engine) speak through, by name; ``options`` and ``policies`` as in :class:`EngineSetup`.

    Raises:
        ConfigError: there is no engine of a name, or what it needs is not installed.
    """
    engines: dict[str, Engine] = {}
    for name in dict.fromkeys(agents.values()):
        if name not in ENGINES:
            raise ConfigError(
                f"engine {name!r}: expected one of {', '.join(ENGINES)}, or pass it to the trainer: engines={{{name!r}: ...}}"
            )
        speaking = {agent for agent, engine in agents.items() if engine == name}
        own = {policy.name: policy for policy in policies.values() if speaking & set(policy.agents)}
        setup = EngineSetup({agent: options.get(agent) for agent in speaking}, own, sampling, folder)
        engines[name] = import_module(ENGINES[name].module).build(setup)
    return engines
