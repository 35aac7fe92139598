"""Check the section ``cluster`` of a configuration, before any process starts."""

import os

from maporl.backends.groups import groups_of
from maporl.backends.ray_cluster import check_installed
from maporl.config import Config
from maporl.config.engines import has_weights
from maporl.errors import ConfigError
from maporl.protocols import build_protocol
from maporl.rewards.likelihood import asks_untrained


def check_cluster(config: Config) -> list[str]:
    """Check that the run can be distributed over groups. Return what they are, as lines of text.

    Raises:
        ConfigError: Ray is missing or too old, a part of the configuration does not work with groups, or the groups do not fit the policies.
    """
    if config.cluster.backend == "local":
        if config.cluster.groups or config.cluster.address is not None or config.cluster.scoring.verifier is not None:
            raise ConfigError(
                "cluster: backend is local, which has no groups, no address and no scoring; set cluster.backend: ray"
            )
        return []
    check_installed()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "cluster.backend: ray starts its processes itself, and the launcher has started several; start with: maporl train"
        )
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
        (
            config.training.placement == "split",
            "training.placement: split",
            "leave it out: every group has its own devices",
        ),
        (
            any(agent.load_in_4bit or agent.load_in_8bit for agent in config.agents.values()),
            "load_in_4bit and load_in_8bit",
            "leave them out, or use cluster.backend: local",
        ),
        (
            any(has_weights(agent.engine) and agent.engine != "transformers" for agent in config.agents.values()),
            "the engine vllm",
            "use engine: transformers, or cluster.backend: local",
        ),
        (bool(config.loop.stages), "loop.stages", "use cluster.backend: local"),
    ):
        if wrong:
            raise ConfigError(f"cluster.backend: ray does not do {what} yet; {remedy}")
    lines = _scoring(config)
    for name, group in groups_of(config).items():
        lines.append(
            f"group {name}: {', '.join(group.policies)}; {group.learner.devices} to train ({group.learner.strategy}), "
            f"{group.engines.replicas} to sample"
        )
    return lines


def _scoring(config: Config) -> list[str]:
    """Return a line about processes that score.

    Raises:
        ConfigError: nothing would use them.
    """
    places, section = config.cluster.scoring.verifier, config.reward.verifier
    if places is None:
        return []
    asked = {*config.reward.sources, *build_protocol(config.protocol, tuple(config.agents)).between_turns()}
    if "verifier" not in asked or section is None:
        raise ConfigError(
            "cluster.scoring.verifier: nothing asks a verifier; add verifier to reward.sources, with reward.verifier.model, or leave "
            "it out"
        )
    for wrong, why in (
        (section.urls, "has urls of servers, which score already"),
        (section.learn_every, "learns (learn_every), which only one in the driver does"),
        (section.reads == "dialogue", "reads whole dialogues (reads), which only one in the driver does"),
        (section.model is None, "has no model"),
    ):
        if wrong:
            raise ConfigError(
                f"cluster.scoring.verifier: reward.verifier {why}; remove that, or leave cluster.scoring out"
            )
    return [f"verifier {section.model}: {places.replicas} to score"]
