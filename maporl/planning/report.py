"""A plan as lines of text and as a record. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from maporl.planning import estimates
from maporl.planning.devices import Cluster
from maporl.planning.placements import Group, Placement

WORTH_STALENESS = 0.75
"""Sampling ahead is recommended if an update then takes less than this share of the time."""


def recommended(found: Sequence[Placement]) -> Placement | None:
    """Return the placement to take: the shortest on-policy one, unless one that samples ahead takes far less; None if none fits."""
    fitting = [one for one in found if not one.refused]
    on_policy = [one for one in fitting if not one.staleness]
    if not fitting:
        return None
    fastest = min(fitting, key=lambda one: one.period)
    if not on_policy:
        return fastest
    best = min(on_policy, key=lambda one: one.period)
    return fastest if fastest.period < WORTH_STALENESS * best.period else best


def lines(groups: Sequence[Group], cluster: Cluster, found: Sequence[Placement]) -> list[str]:
    """Return the plan for people."""
    said = [f"cluster: {cluster.machines} x {cluster.each} x {cluster.name}"]
    for group in groups:
        model, work = group.model, group.work
        said.append(
            f"{group.name}: {model.parameters / 1e9:.2f}e9 parameters, {model.cache / 1e3:.1f} kB of cache a token; an update reads "
            f"{work.read / 1e6:.2f}M tokens and samples {work.sampled / 1e6:.2f}M ({work.conversations} conversations of "
            f"{work.conversation})"
        )
    best = recommended(found)
    for one in found:
        if one.refused:
            said.append(f"{one.sharing}: refused, because {one.refused}")
            continue
        mark = " (recommended)" if one is best else ""
        policy = f"samples are {one.staleness} update old" if one.staleness else "on-policy"
        said.append(f"{one.sharing}: {one.period:.0f} s an update, {policy}; bottleneck: {one.bottleneck}{mark}")
        for share in one.shares:
            spans = " on several machines" if share.spans else ""
            said.append(
                f"  {share.group}: learner on {share.learner}{spans} ({share.memory / 1e9:.0f} GB each), {share.update:.1f} s; {share.engines} "
                f"engines of {share.rows} rows, {share.rollout:.1f} s, of which {share.tail:.1f} wait for the longest answers"
            )
    said.append(
        f"assumed: learning reaches {estimates.LEARNING:.0%} of a device's operations, reading {estimates.READING:.0%}, decoding "
        f"{estimates.DECODING:.0%} of its bandwidth and {1000 * estimates.STEP:.0f} ms a step, links {estimates.MOVING:.0%}. No run on a GPU has "
        "confirmed these numbers"
    )
    return said


def record(groups: Sequence[Group], cluster: Cluster, found: Sequence[Placement]) -> dict[str, Any]:
    """Return the plan for programs."""
    best = recommended(found)
    return {
        "cluster": asdict(cluster),
        "groups": [asdict(group) for group in groups],
        "placements": [asdict(one) | {"staleness": one.staleness} for one in found],
        "recommended": None if best is None else best.sharing,
    }
