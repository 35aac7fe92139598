"""Check the section ``cluster`` of a configuration, before any process starts."""

from maporl.backends.groups import groups_of
from maporl.backends.ray_cluster import check_installed
from maporl.backends.refusals import check_distributed
from maporl.config import Config
from maporl.errors import ConfigError


def check_cluster(config: Config) -> list[str]:
    """Check that the run can be distributed over groups. Return what they are, as lines of text.

    Raises:
        ConfigError: Ray is missing or too old, a part of the configuration does not work with groups, or the groups do not fit the policies.
    """
    if config.cluster.backend == "local":
        if config.cluster.groups or config.cluster.address is not None:
            raise ConfigError("cluster: backend is local, which has no groups and no address; set cluster.backend: ray")
        return []
    check_installed()
    check_distributed(config)
    if config.loop.stages and not any(stage.train == "ppo" for stage in config.loop.stages):
        raise ConfigError(
            "cluster.backend: ray has nothing to do in loop.stages without train: ppo; use cluster.backend: local"
        )
    lines = []
    for name, group in groups_of(config).items():
        lines.append(
            f"group {name}: {', '.join(group.policies)}; {group.learner.devices} to train ({group.learner.strategy}), "
            f"{group.engines.replicas} to sample"
        )
    return lines
