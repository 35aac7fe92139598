"""What does not work with groups of processes. It is refused before any process starts."""

import os

from maporl.config import Config
from maporl.errors import ConfigError


def check_distributed(config: Config) -> None:
    """Check that the policies of a run can be distributed over groups.

    Raises:
        ConfigError: a part of the configuration does not work with groups, or a launcher has started several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "cluster.backend: ray starts its processes itself, and the launcher has started several; start with: "
            "maporl train"
        )
    for wrong, what, remedy in (
        (
            config.training.placement == "split",
            "training.placement: split",
            "leave it out: every group has its own devices",
        ),
        (
            any(a.engine == "vllm" and (a.load_in_4bit or a.load_in_8bit) for a in config.agents.values()),
            "the engine vllm with quantised weights",
            "use engine: transformers for these agents, or cluster.backend: local",
        ),
    ):
        if wrong:
            raise ConfigError(f"cluster.backend: ray does not do {what} yet; {remedy}")
