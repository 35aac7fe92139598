"""The ways to share the devices of a cluster among policies, and what an update takes under each. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

from maporl.planning.devices import Cluster
from maporl.planning.estimates import (
    SENDING,
    WAKING,
    Model,
    Work,
    engine_rows,
    learner_bytes,
    rollout_seconds,
    state_bytes,
    step_seconds,
    update_seconds,
)

Sharing = Literal["sleep", "turns", "apart"]


@dataclass(frozen=True)
class Group:
    """One policy, with the model and the work that it has in an update."""

    name: str
    model: Model
    work: Work


@dataclass(frozen=True)
class Share:
    """What one group has, and takes in an update.

    Args:
        learner: devices of the learner.
        engines: replicas of the engine, each on one device.
        rows: conversations in an engine at one time.
        update: seconds of learning.
        moving: seconds of moving shards, which overlap with arithmetic. Where they are more, ``update`` is these.
        rollout: seconds of sampling, with the tail.
        tail: those in which the longest answers end alone.
        slowest: seconds of a dialogue all of whose answers are the longest, on an engine that has nothing else to do.
        sending: seconds of sending the weights to the engines.
        memory: bytes a device while the learner works.
        spans: whether the learner's devices are on several machines.
    """

    group: str
    learner: int
    engines: int
    rows: int
    update: float
    moving: float
    rollout: float
    tail: float
    slowest: float
    sending: float
    memory: float
    spans: bool


@dataclass(frozen=True)
class Placement:
    """One way to share the devices out.

    - ``sleep``: a group's learner and engines are on the same devices in turn, and groups work at the same time.
    - ``turns``: all groups share all devices. They sample at the same time, and learn one after the other.
    - ``apart``: learners and engines have devices of their own, so that sampling runs ahead by one update.
    """

    sharing: Sharing
    shares: tuple[Share, ...]
    period: float
    bottleneck: str
    refused: str = ""

    @property
    def staleness(self) -> int:
        """Return by how many updates sampled tokens may be older than the weights that learn from them."""
        return int(self.sharing == "apart")


def placements(groups: Sequence[Group], cluster: Cluster) -> list[Placement]:
    """Return the best placement of each kind of sharing that fits, from the shortest period to the longest.

    Of equals in everything, the one on-policy comes first. A kind that does not fit is last, with the reason.
    """
    found = []
    for candidates in (_sleeping(groups, cluster), _turning(groups, cluster), _apart(groups, cluster)):
        tried = list(candidates)
        fitting = [one for one in tried if not one.refused]
        if tried:
            found.append(min(fitting or tried, key=lambda one: (one.period, _most(one))))
    return sorted(found, key=lambda one: (bool(one.refused), one.period, one.staleness))


def _most(placement: Placement) -> float:
    return max(share.memory for share in placement.shares)


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut ``total`` into ``parts`` whole numbers above 0."""
    for cuts in combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(ends))


def _spanning(sizes: Sequence[int], cluster: Cluster) -> list[bool]:
    """Return of each learner whether it is on several machines, if the largest are placed first, each where it fits."""
    free = [cluster.each] * cluster.machines
    spans = [False] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        place = next((m for m, left in enumerate(free) if left >= sizes[number]), None)
        spans[number] = place is None
        if place is not None:
            free[place] -= sizes[number]
    return spans


def _share(
    group: Group,
    cluster: Cluster,
    learner: int,
    engines: int,
    spans: bool,
    *,
    states: float,
    others: float,
    asleep: bool,
) -> Share:
    """Return what a group has. ``states`` are learners' bytes on its engines' devices, ``others`` other learners' on its own."""
    model, work, device = group.model, group.work, cluster.device
    rows = engine_rows(model, work, device, states)
    arithmetic, moving = update_seconds(model, work, device, learner, spans)
    body, tail = rollout_seconds(model, work, device, engines, rows) if rows else (float("inf"), 0.0)
    sending = 2 * model.weights / WAKING if asleep else model.weights / (SENDING * min(learner, 4))
    memory = learner_bytes(model, work, learner, others)
    update = max(arithmetic, moving)
    slowest = work.turns * work.longest * step_seconds(model, 1, 0, device)
    return Share(group.name, learner, engines, rows, update, moving, body + tail, tail, slowest, sending, memory, spans)


def _sleeping(groups: Sequence[Group], cluster: Cluster) -> Iterator[Placement]:
    for sizes in _splits(cluster.devices, len(groups)):
        shares = [
            _share(g, cluster, n, n, spans, states=state_bytes(g.model, g.work, n), others=0.0, asleep=True)
            for g, n, spans in zip(groups, sizes, _spanning(sizes, cluster), strict=True)
        ]
        rollout, update = max(s.rollout for s in shares), max(s.update for s in shares)
        yield _placed("sleep", shares, rollout + update + max(s.sending for s in shares), rollout, update, cluster)


def _turning(groups: Sequence[Group], cluster: Cluster) -> Iterator[Placement]:
    total = cluster.devices
    engines = total // len(groups)
    if not engines or len(groups) < 2:  # a single group has nobody to take turns with
        return
    kept = [state_bytes(g.model, g.work, total) for g in groups]
    shares = [
        _share(g, cluster, total, engines, cluster.machines > 1, states=sum(kept), others=sum(kept) - own, asleep=True)
        for g, own in zip(groups, kept, strict=True)
    ]
    rollout, update = max(s.rollout for s in shares), sum(s.update for s in shares)
    yield _placed("turns", shares, rollout + update + sum(s.sending for s in shares), rollout, update, cluster)


def _apart(groups: Sequence[Group], cluster: Cluster) -> Iterator[Placement]:
    for sizes in _splits(cluster.devices, 2 * len(groups)):
        learners, engines = sizes[: len(groups)], sizes[len(groups) :]
        shares = [
            _share(g, cluster, n, r, spans, states=0.0, others=0.0, asleep=False)
            for g, n, r, spans in zip(groups, learners, engines, _spanning(learners, cluster), strict=True)
        ]
        # sampling is one update ahead, so the tail of one batch overlaps with the next, and a dialogue may last two updates
        rollout = max(max(s.rollout - s.tail, s.slowest / 2) for s in shares)
        update = max(s.update for s in shares)
        yield _placed("apart", shares, max(rollout, update) + max(s.sending for s in shares), rollout, update, cluster)


def _placed(
    sharing: Sharing, shares: list[Share], period: float, rollout: float, update: float, cluster: Cluster
) -> Placement:
    longest = "sampling" if rollout > update else "learning"
    if longest == "learning" and any(s.update == s.moving for s in shares):
        longest = "moving shards between devices"
    refused = next(filter(None, (_why_not(share, cluster) for share in shares)), "")
    share = (rollout if longest == "sampling" else update) / period if period < float("inf") else 1.0
    return Placement(sharing, tuple(shares), period, f"{longest} ({share:.0%} of an update)", refused)


def _why_not(share: Share, cluster: Cluster) -> str:
    if share.memory > cluster.device.memory:
        return f"the learner of {share.group} needs {share.memory / 1e9:.0f} GB of {cluster.device.memory / 1e9:.0f} on each device"
    if not share.rows:
        return f"the engine of {share.group} has no memory left for a conversation beside what lies on its device"
    return ""
