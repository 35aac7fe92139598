"""The engine ``python``: one that a Python program passes to its trainer. A configuration cannot build it."""

from maporl.engines.base import Engine
from maporl.engines.build import EngineSetup
from maporl.errors import ConfigError


def build(setup: EngineSetup) -> Engine:
    """Refuse, because no name says how to build the engine.

    Raises:
        ConfigError: always. The message names the agents.
    """
    agents = ", ".join(sorted(setup.options))
    raise ConfigError(
        f"engine 'python' of {agents}: it was passed in Python, and nothing here can build it; pass it again: "
        "MultiAgentPPOTrainer(..., engines={'python': ...})"
    )
