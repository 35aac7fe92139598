"""Check the section ``cluster`` of a configuration, before any process starts."""

import os

from maporl.backends.groups import groups_of, trained_policies, vllm_of
from maporl.backends.places import check_places
from maporl.backends.ray_cluster import check_installed
from maporl.config import Config
from maporl.errors import ConfigError
from maporl.run import ResolvedRun


def check_cluster(run: ResolvedRun) -> list[str]:
    """Check that the run can be distributed over groups. Return what they are, as lines of text.

    Raises:
        ConfigError: Ray is missing or too old, a part of the configuration does not work with groups, or the groups do
            not fit the policies.
    """
    config = run.config
    if config.cluster.backend == "local":
        options = {"groups": config.cluster.groups, "pools": config.cluster.pools, "address": config.cluster.address}
        options |= {"devices": config.cluster.devices != "auto", "scoring": config.cluster.scoring.verifier}
        if chosen := [key for key, value in options.items() if value]:
            raise ConfigError(f"cluster.{chosen[0]}: backend is local, which has none; set cluster.backend: ray")
        return []
    check_installed()
    check_distributed(config)
    if config.loop.stages and not any(stage.train == "ppo" for stage in config.loop.stages):
        raise ConfigError(
            "cluster.backend: ray has nothing to do in loop.stages without train: ppo; use cluster.backend: local"
        )
    lines = _scoring(run)
    groups = groups_of(config)
    in_vllm = vllm_of(config, groups)
    check_places(config.cluster, groups, trained_policies(config), in_vllm, config.training.async_depth)
    shared = {"apart": "", "turns": ", in turns", "sleep": " on the same devices, asleep while it trains"}
    for name, group in groups.items():
        lines.append(
            f"group {name}: {', '.join(group.policies)}; {group.learner.devices} to train ({group.learner.strategy}), "
            f"{group.engines.replicas} to sample{' with vLLM' if name in in_vllm else ''}{shared[group.sharing]}"
        )
    return lines


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


def _scoring(run: ResolvedRun) -> list[str]:
    """Return a line about processes that score."""
    config = run.config
    places, section = config.cluster.scoring.verifier, config.reward.verifier
    if places is None:
        return []
    asked = {*config.reward.sources, *run.protocol.between_turns()}
    if "verifier" not in asked or section is None:
        raise ConfigError(
            "cluster.scoring.verifier: nothing asks a verifier; add verifier to reward.sources, with "
            "reward.verifier.model, or leave it out"
        )
    for wrong, why in (
        (section.urls, "has urls of servers, which score already"),
        (section.learn_every, "learns (learn_every), which only one in the driver does"),
        (section.reads == "dialogue", "reads whole dialogues (reads), which only one in the driver does"),
        (section.pays == "output", "pays its output (pays), which only one in the driver does"),
        (section.model is None, "has no model"),
    ):
        if wrong:
            raise ConfigError(
                f"cluster.scoring.verifier: reward.verifier {why}; remove that, or leave cluster.scoring out"
            )
    return [f"verifier {section.model}: {places.replicas} to score"]
