"""Check the section ``cluster`` of a configuration, before any process starts."""

import os
from collections.abc import Iterator

from maporl.config import Config
from maporl.errors import Fault, refused
from maporl.integrations.ray.groups import group_faults, groups_of, place_faults, trained_policies, vllm_of
from maporl.integrations.ray.ray_cluster import check_installed
from maporl.run import ResolvedRun


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why the run cannot be distributed over groups: Ray is missing or too old, a part of the configuration does
    not work with groups, or the groups do not fit the policies. Where the backend is local, yield options of groups."""
    config = run.config
    cluster = config.cluster
    if cluster.backend != "ray":
        options = {"groups": cluster.groups, "pools": cluster.pools, "address": cluster.address}
        options |= {"devices": cluster.devices != "auto", "scoring": cluster.scoring.verifier}
        for key in (key for key, value in options.items() if value):
            yield Fault(f"cluster.{key}", f"backend is {cluster.backend}, which has none", "set cluster.backend: ray")
        return
    yield from refused(check_installed)
    yield from undistributed(config)
    if config.loop.stages and not any(stage.train == "ppo" for stage in config.loop.stages):
        what = "ray has nothing to do in loop.stages without train: ppo"
        yield Fault("cluster.backend", what, "use cluster.backend: local")
    yield from _scoring(run)
    misfits = list(group_faults(config))
    yield from misfits
    if misfits:
        return
    groups = groups_of(config)
    in_vllm = vllm_of(config, groups)
    yield from place_faults(cluster, groups, trained_policies(config), in_vllm, config.training.async_depth)


def undistributed(config: Config) -> Iterator[Fault]:
    """Yield what does not work with groups: parts of the configuration, or a launcher that has started several
    processes."""
    key = "cluster.backend"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = "ray starts its processes itself, and the launcher has started several"
        yield Fault(key, what, "start with: maporl train")
    if config.training.placement == "split":
        remedy = "leave it out: every group has its own devices"
        yield Fault(key, "ray does not do training.placement: split yet", remedy)
    if any(a.engine == "vllm" and (a.load_in_4bit or a.load_in_8bit) for a in config.agents.values()):
        remedy = "use engine: transformers for these agents, or cluster.backend: local"
        yield Fault(key, "ray does not do the engine vllm with quantised weights yet", remedy)


def _scoring(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why there can be no processes that score."""
    key, section = "cluster.scoring.verifier", run.config.reward.verifier
    if run.config.cluster.scoring.verifier is None:
        return
    if "verifier" not in {*run.config.reward.asked, *run.protocol.between_turns()} or section is None:
        remedy = "add verifier to reward.sources, with reward.verifier.model, or leave it out"
        yield Fault(key, "nothing asks a verifier", remedy)
        return
    for wrong, why in (
        (section.urls, "has urls of servers, which score already"),
        (section.learn_every, "learns (learn_every), which only one in the driver does"),
        (section.reads == "dialogue", "reads whole dialogues (reads), which only one in the driver does"),
        (section.pays == "output", "pays its output (pays), which only one in the driver does"),
        (section.model is None and not section.urls, "has no model"),
    ):
        if wrong:
            yield Fault(key, f"reward.verifier {why}", "remove that, or leave cluster.scoring out")


def group_lines(run: ResolvedRun, measured: object = None) -> list[str]:
    """Return what the groups of a run are, as lines of text."""
    config = run.config
    lines, replicas = [], config.cluster.scoring.verifier
    if replicas is not None and config.reward.verifier is not None:
        lines.append(f"verifier {config.reward.verifier.model}: {replicas.replicas} to score")
    groups = groups_of(config)
    in_vllm = vllm_of(config, groups)
    shared = {"apart": "", "turns": ", in turns", "sleep": " on the same devices, asleep while it trains"}
    for name, group in groups.items():
        lines.append(
            f"group {name}: {', '.join(group.policies)}; {group.learner.devices} to train ({group.learner.strategy}), "
            f"{group.engines.replicas} to sample{' with vLLM' if name in in_vllm else ''}{shared[group.sharing]}"
        )
    return lines
