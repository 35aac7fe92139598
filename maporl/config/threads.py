"""Choose the threads of a run from its configuration. ``maporl check`` prints them, and ``maporl train`` uses them."""

from maporl.config.schema import Config
from trl_ext.process.threads import Threads, choose


def threads_of(config: Config) -> Threads:
    """Return how many threads a run of ``config`` computes with in this process, and why."""
    return choose(tiny=all(agent.tiny is not None for agent in config.agents.values() if agent.weights))
