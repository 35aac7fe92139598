"""A plan as lines of text, as a record, and as the section ``cluster`` of a configuration. Imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from maporl.config import Config
from maporl.config.parse import to_yaml
from maporl.errors import ConfigError
from maporl.integrations.ray.section import EnginePlaces, GroupSection, LearnerPlaces
from maporl.studies.planning import estimates
from maporl.studies.planning.devices import Cluster
from maporl.studies.planning.estimates import Rates
from maporl.studies.planning.placements import Group, Placement, apart, staleness_for
from trl_ext.models.shape import PLANNED

# -- lines of text, and a record ---------------------------------------------------------------------------------------

WORTH_STALENESS = 0.75
"""Older samples are recommended if an update then takes less than this share of the time."""


def recommended(placements: Sequence[Placement]) -> Placement | None:
    """Return the placement to take, or None if none fits.

    It is the shortest on-policy one, unless one with older samples takes far less. One with still older samples must
    take far less again.
    """
    best: Placement | None = None
    for one in sorted(placements, key=lambda one: (one.staleness, one.period)):
        if not one.refused and (
            best is None or one.period < (WORTH_STALENESS if one.staleness > best.staleness else 1.0) * best.period
        ):
            best = one
    return best


def lines(
    groups: Sequence[Group], cluster: Cluster, placements: Sequence[Placement], runs: Placement | None = None
) -> list[str]:
    """Return the plan for people. ``runs`` is the placement with which the configuration runs as it is, which is the
    one that is written, or None."""
    said = [f"cluster: {cluster.machines} x {cluster.each} x {cluster.name}", *map(_work, groups)]
    best = recommended(placements)
    for one in placements if runs is None or _among(runs, placements) else [runs, *placements]:
        ahead = f" with async_depth {one.staleness}" if one.staleness else ""
        if one.refused:
            said.append(f"{one.sharing}{ahead}: refused, because {one.refused}")
            continue
        mark = " (recommended)" if _same(one, runs or best) else ""
        if not mark and one is best and runs is not None:
            mark = f" (less, but the configuration has {' and '.join(_changes(runs, one))})"
        policy = "" if one.staleness else ", on-policy"
        said.append(f"{one.sharing}{ahead}: {one.period:.3g} s an update{policy}; bottleneck: {one.bottleneck}{mark}")
        for share in one.shares:
            spans = " on several machines" if share.spans else ""
            learner = (
                f"learner on {share.learner}{spans} ({share.memory / 1e9:.0f} GB each), {share.update:.1f} s; "
                if share.learner
                else ""
            )
            said.append(
                f"  {share.group}: {learner}{share.engines} engines of {share.rows} rows, {share.rollout:.1f} s, of "
                f"which {share.tail:.1f} wait for the longest answers"
            )
        if one.staleness:
            said.append(f"  {_slowest(one)}")
    return [*said, _assumed(cluster)]


def _same(one: Placement, other: Placement | None) -> bool:
    return other is not None and (one.sharing, one.staleness) == (other.sharing, other.staleness)


def _among(one: Placement, placements: Sequence[Placement]) -> bool:
    return any(_same(one, other) for other in placements)


def _changes(runs: Placement, other: Placement) -> list[str]:
    """Return what the configuration has that keeps it from the ``other`` placement."""
    depth = f"training.async_depth: {runs.staleness}, not {other.staleness}"
    asleep = "engines that keep their memory (all agents with engine: vllm would sleep)"
    shares = other.sharing != "apart" and runs.sharing == "apart"
    return [depth] * (runs.staleness != other.staleness) + [asleep] * shares


def _work(group: Group) -> str:
    model, work = group.model, group.work
    adapters = f", {model.adapters / 1e6:.1f}e6 in adapters" if model.adapters else ""
    does = (
        f"an update reads {work.read / 1e6:.2f}M tokens and samples {work.sampled / 1e6:.2f}M ({work.conversations} "
        f"conversations of {work.conversation})"
        if work.conversations
        else "it does not play"
    )
    learns = "" if group.trained else ", does not learn"
    return (
        f"{group.name}: {', '.join(group.policies or (group.name,))}{learns}; {model.parameters / 1e9:.2f}e9 "
        f"parameters{adapters}, {model.kv_cache(1) / 1e3:.1f} kB of cache a token; {does}"
    )


def _slowest(one: Placement) -> str:
    """Return what the slowest dialogue that is possible means for a period."""
    alone, full = (max(getattr(share, name) for share in one.shares) for name in ("slowest", "crowded"))
    least, most = (staleness_for(one.shares, one.period, seconds) for seconds in (alone, full))
    return (
        f"a dialogue of the longest answers takes {alone:.0f} s alone and {full:.0f} s on a full engine; with "
        f"async_depth {least} and {most} no update waits for it"
    )


def _assumed(cluster: Cluster) -> str:
    rates = Rates.assumed(cluster.device)
    return (
        f"assumed of a device: learning {rates.learning / 1e12:.3g} TFLOP/s, reading prompts "
        f"{rates.reading / 1e12:.3g}, decoding {rates.decoding / 1e12:.3g}, {rates.bandwidth / 1e9:.3g} GB/s of "
        f"weights and cache, {1000 * rates.step:.3g} ms a step besides; links reach {estimates.MOVING:.0%}, weights "
        f"are sent at {estimates.SENDING / 1e9:.0f} GB/s and wake at {estimates.WAKING / 1e9:.0f}, micro-batches of "
        f"{estimates.MICROBATCH} tokens with training.gradient_checkpointing; of a device's memory learners leave "
        f"{1 - PLANNED:.0%} free and engines {estimates.LEFT_FREE:.0%}. No run on a GPU has confirmed these numbers"
    )


def record(
    groups: Sequence[Group], cluster: Cluster, placements: Sequence[Placement], runs: Placement | None = None
) -> dict[str, Any]:
    """Return the plan for programs. ``runs`` is as for :func:`lines`."""
    best = runs or recommended(placements)
    return {
        "cluster": asdict(cluster) | {"rates": asdict(Rates.assumed(cluster.device))},
        "groups": [asdict(group) for group in groups],
        "placements": [asdict(one) for one in placements],
        "recommended": None if best is None else {"sharing": best.sharing, "async_depth": best.staleness},
    }


# -- a section that runs with the backend ray --------------------------------------------------------------------------


def runnable(
    config: Config, groups: Sequence[Group], cluster: Cluster, placements: Sequence[Placement]
) -> Placement | None:
    """Return the quickest placement with which ``config`` runs as it is, or None if none fits.

    It has the configuration's own ``async_depth``. Devices are shared only where vLLM samples from all groups and
    nobody plays ahead, because other engines do not give their memory back.

    Args:
        config: the configuration.
        groups: its groups.
        cluster: the devices.
        placements: all placements of the plan.
    """
    depth = config.training.async_depth
    speaking = [agent for agent in config.agents.values() if agent.weights]
    sleeps = all(a.engine == "vllm" and a.vllm and a.vllm.colocate and a.vllm.colocate.sleep for a in speaking)
    shared = [one for one in placements if one.sharing != "apart"] if sleeps and not depth else []
    fitting = [one for one in (*apart(groups, cluster, [depth]), *shared) if not one.refused]
    return min(fitting, key=lambda one: one.period, default=None)


def with_layout(config: Config, groups: Sequence[Group], placed: Placement) -> Config:
    """Return ``config`` with the groups of a placement, for the backend ``ray``.

    Learners of several devices that train all weights are sharded (``fsdp2``). Adapters share a base, so that every
    device has the whole of it. The other keys of the section ``cluster`` stay.
    """
    sections = {}
    for group, share in zip(groups, placed.shares, strict=True):
        sharded = share.learner > 1 and not group.model.adapters
        sections[group.name] = GroupSection(
            list(group.policies or (group.name,)),
            LearnerPlaces(devices=max(share.learner, 1), strategy="fsdp2" if sharded else "replicated"),
            EnginePlaces(replicas=share.engines, rows=share.rows),
            placed.sharing,
        )
    return replace(config, cluster=replace(config.cluster, backend="ray", groups=sections))


def section_lines(config: Config, groups: Sequence[Group]) -> list[str]:
    """Return the section ``cluster`` as YAML: the backend and the groups.

    A group that does not learn has no learner.
    """
    shown = {}
    for group in groups:
        section = asdict(config.cluster.groups[group.name])
        shown[group.name] = section if group.trained else {key: section[key] for key in ("policies", "engines")}
    values = {"cluster": {"backend": "ray", "groups": shown}}
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120).splitlines()


def write_layout(config: Config, file: Path) -> None:
    """Write a whole configuration into a new file.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as out:
            out.write(to_yaml(config))
    except FileExistsError:
        raise ConfigError(f"--write {file}: is there already; name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"--write {file}: cannot be written ({error.strerror}); name another file") from None
