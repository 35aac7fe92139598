"""The ways to share the devices of a cluster among policies, and what an update takes under each. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, pairwise
from math import ceil
from typing import Literal

from maporl.studies.planning.devices import Cluster
from maporl.studies.planning.estimates import (
    SENDING,
    WAKING,
    Work,
    engine_rows,
    learner_bytes,
    rollout_seconds,
    state_bytes,
    step_seconds,
    update_seconds,
)
from trl_ext.models.shape import PLANNED, Shape

Sharing = Literal["sleep", "turns", "apart"]
BOUNDS = (0, 1, 2, 4, 8)
"""The values of ``training.async_depth`` for which ``apart`` is planned."""
SHORTER = 0.99
"""A larger bound is worth a line if an update then takes less than this share of the time."""


@dataclass(frozen=True)
class Group:
    """Policies of one base model, with the work that they have in an update.

    Args:
        name: the group's name.
        model: the base model.
        work: what its policies do together.
        policies: their names. By default one with the name of the group.
        trained: whether it learns. Otherwise it has engines alone.
        base: the folder of the base model, or its name on the hub.
    """

    name: str
    model: Shape
    work: Work
    policies: tuple[str, ...] = ()
    trained: bool = True
    base: str = ""


@dataclass(frozen=True)
class Share:
    """The devices of one group, and its time in an update.

    Args:
        learner: devices of the learner.
        engines: replicas of the engine, each on one device.
        rows: conversations that an engine has room for at one time.
        update: seconds of learning.
        moving: seconds of moving shards, which overlap with arithmetic. Where they are more, ``update`` is these.
        rollout: seconds of sampling, with the tail.
        tail: those in which the longest answers end alone.
        slowest: seconds of a dialogue all of whose answers are the longest, on an engine that has nothing else to do.
        crowded: the same on an engine that is full.
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
    crowded: float
    sending: float
    memory: float
    spans: bool


@dataclass(frozen=True)
class Placement:
    """One way to share the devices out.

    - ``sleep``: a group's learner and engines are on the same devices in turn, and groups work at the same time.
    - ``turns``: all groups share all devices. They sample at the same time, and learn one after the other.
    - ``apart``: learners and engines have devices of their own. With ``staleness`` above 0, sampling runs ahead.

    ``staleness``: the most updates by which dialogues may be older than the weights that they train
    (``training.async_depth``).
    """

    sharing: Sharing
    shares: tuple[Share, ...]
    period: float
    bottleneck: str
    refused: str = ""
    staleness: int = 0


def placements(groups: Sequence[Group], cluster: Cluster, bounds: Sequence[int] = BOUNDS) -> list[Placement]:
    """Return the best placement of each kind of sharing that fits, from the shortest period to the longest.

    ``apart`` is there for each of ``bounds`` that makes an update shorter than the smaller ones do. Of equals in
    everything, the one on-policy comes first. A kind that does not fit is last, with the reason.
    """
    candidates = [list(_sleeping(groups, cluster)), list(_turning(groups, cluster))]
    chosen = [_best(kind) for kind in candidates if kind]
    shortest = float("inf")
    for best in apart(groups, cluster, sorted(bounds)):
        if best.period < SHORTER * shortest or shortest == float("inf"):
            chosen.append(best)
            shortest = best.period
        if best.refused:  # a larger bound makes no room
            break
    return sorted(chosen, key=lambda one: (bool(one.refused), one.period, one.staleness))


def apart(groups: Sequence[Group], cluster: Cluster, bounds: Sequence[int]) -> list[Placement]:
    """Return for each bound of staleness the best placement with devices of their own for learners and engines.

    The list is empty if there are too few devices.
    """
    candidates = list(_apart(groups, cluster))
    return [_best([_ahead(shares, bound, cluster) for shares in candidates]) for bound in bounds] if candidates else []


def period_apart(shares: Sequence[Share], staleness: int) -> float:
    """Return the seconds of an update if learners and engines have devices of their own.

    A batch is begun when the batch ``staleness + 1`` before it has been learned. In this many periods it is played and
    learned. So no period is shorter than the slowest dialogue divided by this number, and none is shorter than the
    learning or the sampling of one update. One batch at a time fills the engines.
    """
    update, sending = max(s.update for s in shares), max(s.sending for s in shares)
    sampling, rollout = max(s.rollout - s.tail for s in shares), max(s.rollout for s in shares)
    slowest = max(s.slowest for s in shares)
    return max(max(update, sampling) + sending, max(rollout + update + sending, slowest) / (staleness + 1))


def staleness_for(shares: Sequence[Share], period: float, slowest: float) -> int:
    """Return the least bound with which no dialogue of ``slowest`` seconds makes a learner of this period wait for
    it."""
    learning = max(s.update for s in shares) + max(s.sending for s in shares)
    return max(0, ceil((slowest + learning) / period - 1e-9) - 1)


def _best(tried: list[Placement]) -> Placement:
    fitting = [one for one in tried if not one.refused]
    return min(fitting or tried, key=lambda one: (one.period, _most(one)))


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
    states: float = 0.0,
    others: float = 0.0,
    asleep: bool = False,
) -> Share:
    """Return what a group has. ``states`` are learners' bytes beside its engines, ``others`` beside its learner."""
    model, work, device = group.model, group.work, cluster.device
    room = engine_rows(model, work, device, states)
    rows = min(room, work.conversations / engines) or room  # no engine has more conversations than there are
    body, tail = rollout_seconds(model, work, device, engines, rows) if room else (float("inf"), 0.0)
    alone, full = step_seconds(model, 1, 0, device), step_seconds(model, max(room, 1), work.context, device)
    answers = work.turns * work.longest if work.conversations else 0
    share = Share(
        group.name, 0, engines, room, 0.0, 0.0, body + tail, tail, answers * alone, answers * full, 0.0, 0.0, False
    )
    if not group.trained:
        return share
    arithmetic, moving = update_seconds(model, work, device, learner, spans)
    return replace(
        share,
        learner=learner,
        update=max(arithmetic, moving),
        moving=moving,
        sending=2 * model.sent / WAKING if asleep else model.sent / (SENDING * min(learner, 4)),
        memory=learner_bytes(model, work, learner, others),
        spans=spans,
    )


def _kept(group: Group, ranks: int) -> float:
    return state_bytes(group.model, group.work, ranks) if group.trained else 0.0


def _sleeping(groups: Sequence[Group], cluster: Cluster) -> Iterator[Placement]:
    for sizes in _splits(cluster.devices, len(groups)):
        shares = [
            _share(g, cluster, n, n, spans, states=_kept(g, n), asleep=True)
            for g, n, spans in zip(groups, sizes, _spanning(sizes, cluster), strict=True)
        ]
        rollout, update = max(s.rollout for s in shares), max(s.update for s in shares)
        yield _placed("sleep", shares, rollout + update + max(s.sending for s in shares), rollout, update, cluster)


def _turning(groups: Sequence[Group], cluster: Cluster) -> Iterator[Placement]:
    total = cluster.devices
    engines = total // len(groups)
    if not engines or len(groups) < 2:  # a single group has nobody to take turns with
        return
    held = [_kept(g, total) for g in groups]
    shares = [
        _share(g, cluster, total, engines, cluster.machines > 1, states=sum(held), others=sum(held) - h, asleep=True)
        for g, h in zip(groups, held, strict=True)
    ]
    rollout, update = max(s.rollout for s in shares), sum(s.update for s in shares)
    yield _placed("turns", shares, rollout + update + sum(s.sending for s in shares), rollout, update, cluster)


def _apart(groups: Sequence[Group], cluster: Cluster) -> Iterator[list[Share]]:
    """Yield what each group would have under every way to give devices to learners and to engines."""
    share = cache(partial(_share, cluster=cluster))
    learning = [number for number, group in enumerate(groups) if group.trained]
    for sizes in _splits(cluster.devices, len(learning) + len(groups)):
        learners = dict(zip(learning, sizes, strict=False))
        spans = dict(zip(learning, _spanning(sizes[: len(learning)], cluster), strict=True))
        yield [
            share(group, learner=learners.get(number, 0), engines=engines, spans=spans.get(number, False))
            for number, (group, engines) in enumerate(zip(groups, sizes[len(learning) :], strict=True))
        ]


def _ahead(shares: list[Share], staleness: int, cluster: Cluster) -> Placement:
    # on-policy, the tail is waited for as well
    sampling = max(s.rollout - (s.tail if staleness else 0.0) for s in shares)
    update, period = max(s.update for s in shares), period_apart(shares, staleness)
    placed = _placed("apart", shares, period, sampling, update, cluster)
    waiting = staleness and max(sampling, update) + max(s.sending for s in shares) < period < float("inf")
    told = "waiting for the longest dialogues" if waiting else placed.bottleneck
    return replace(placed, staleness=staleness, bottleneck=told)


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
    if share.memory > PLANNED * cluster.device.memory:
        return (
            f"the learner of {share.group} needs {share.memory / 1e9:.0f} GB on each device, of whose "
            f"{cluster.device.memory / 1e9:.0f} GB {PLANNED:.0%} are planned for"
        )
    if not share.rows:
        return f"the engine of {share.group} has no memory left for a conversation beside what lies on its device"
    return ""
