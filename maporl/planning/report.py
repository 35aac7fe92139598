"""A plan as lines of text and as a record. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from maporl.planning import estimates
from maporl.planning.devices import Cluster
from maporl.planning.estimates import Rates
from maporl.planning.placements import Group, Placement, staleness_for

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
        f"{estimates.MICROBATCH} tokens with training.gradient_checkpointing. No run on a GPU has confirmed these "
        "numbers"
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
