"""Check the section ``cluster`` of a configuration, before any process starts."""

from maporl.backends.groups import groups_of, trained_policies
from maporl.backends.places import check_places
from maporl.backends.ray_cluster import check_installed
from maporl.backends.refusals import check_distributed
from maporl.config import Config
from maporl.errors import ConfigError
from maporl.rewards.likelihood import asks_untrained


def check_cluster(config: Config) -> list[str]:
    """Check that the run can be distributed over groups. Return what they are, as lines of text.

    Raises:
        ConfigError: Ray is missing or too old, a part of the configuration does not work with groups, or the groups do not fit the policies.
    """
    if config.cluster.backend == "local":
        own = {"groups": config.cluster.groups, "pools": config.cluster.pools, "address": config.cluster.address}
        own["devices"] = config.cluster.devices != "auto"
        if given := [key for key, value in own.items() if value]:
            raise ConfigError(f"cluster.{given[0]}: backend is local, which has none; set cluster.backend: ray")
        return []
    check_installed()
    check_distributed(config)
    for wrong, what, remedy in (
        (
            config.schedule.opponent_pool is not None,
            "schedule.opponent_pool",
            "leave it out, or use cluster.backend: local",
        ),
        (
            asks_untrained(config.restate, config.reward.sources) is not None,
            "restate and the reward nll, which ask the weights before training",
            "leave them out, or use cluster.backend: local",
        ),
        (bool(config.loop.stages), "loop.stages", "use cluster.backend: local"),
    ):
        if wrong:
            raise ConfigError(f"cluster.backend: ray does not do {what} yet; {remedy}")
    lines = []
    groups = groups_of(config)
    check_places(config.cluster, groups, trained_policies(config))
    for name, group in groups.items():
        turns = ", in turns" if group.sharing == "turns" else ""
        lines.append(
            f"group {name}: {', '.join(group.policies)}; {group.learner.devices} to train ({group.learner.strategy}), "
            f"{group.engines.replicas} to sample{turns}"
        )
    return lines
