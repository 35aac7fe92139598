"""What the processes of each group did in the last updates, and which of them the others wait for (``cluster.backend:
ray``)."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from maporl.report.charts import finite
from maporl.report.findings import WORK, said
from maporl.report.read import Run

LAST = 20
"""How many updates are shown: the newest."""
KINDS = ("learning", "sampling", "sending", "saving", "dead", "idle")
"""What processes do, in the order in which it is drawn."""
MOSTLY_IDLE = 0.5
"""Where every group works for less than this share of the time, the driver sets the pace."""
_SECONDS = re.compile(
    r"group/(?P<group>[^/]+)/(?P<part>learner|engines)/(?P<what>learning|sampling|sending|saving|dead)"
)


@dataclass(frozen=True)
class Bar:
    """The processes of a group that train (``learner``) or sample (``engines``): what they did in each update, in
    seconds."""

    group: str
    part: str
    updates: list[dict[str, float]]

    def shares(self) -> dict[str, float]:
        """The share of each kind of work in the time of all updates."""
        spent = {what: sum(update[what] for update in self.updates) for what in KINDS}
        whole = sum(spent.values()) or 1.0
        return {what: seconds / whole for what, seconds in spent.items()}


class Pace(NamedTuple):
    """The processes that the others wait for: which ``work`` they do for which share of the time. Without ``work``, all
    are idle most of the time, and ``share`` is that in which the processes of the busiest group work."""

    group: str
    part: str
    work: str
    share: float


def bars(run: Run) -> tuple[list[int], list[Bar]]:
    """The newest updates that a run with groups has recorded, and a bar for each part of each group."""
    records = [r for r in run.metrics if any(_SECONDS.fullmatch(name) for name in r)][-LAST:]
    parts = {(m["group"], m["part"]): None for r in records for name in r if (m := _SECONDS.fullmatch(name))}
    ordered = sorted(parts, key=lambda part: (part[0], part[1] != "learner"))
    return [r["step"] for r in records], [Bar(*part, [_spent(r, *part) for r in records]) for part in ordered]


def _spent(record: dict[str, Any], group: str, part: str) -> dict[str, float]:
    seconds = {what: max(finite(record.get(f"group/{group}/{part}/{what}")) or 0.0, 0.0) for what in KINDS}
    whole = finite(record.get(f"group/{group}/seconds")) or 0.0
    return {**seconds, "idle": max(seconds["idle"] * whole, 0.0)}


def section(run: Run) -> dict[str, Any] | None:
    """What the page shows of groups: bars, and a sentence about what sets the pace. None without groups."""
    steps, parts = bars(run)
    if not parts:
        return None
    return {
        "steps": steps,
        "kinds": KINDS,
        "bars": [
            {
                "name": f"{bar.group}, {bar.part}",
                "updates": [[finite(update[what]) for what in KINDS] for update in bar.updates],
                "shares": [finite(share) for share in bar.shares().values()],
            }
            for bar in parts
        ],
        "bottleneck": said("pace", pace_of(parts)),
    }


def pace_of(parts: list[Bar]) -> Pace:
    """Which processes the others wait for."""
    shares = {(bar.group, bar.part): bar.shares() for bar in parts}
    busy: dict[str, float] = {}
    for (group, _), spent in shares.items():
        busy[group] = busy.get(group, 0.0) + 1 - spent["idle"]
    most = max(busy, key=lambda group: busy[group])
    if busy[most] < MOSTLY_IDLE:
        return Pace(most, "", "", busy[most])
    group, part = slowest = min(shares, key=lambda key: shares[key]["idle"])
    work = max(WORK[part], key=lambda kind: shares[slowest][kind])
    return Pace(group, part, work, shares[slowest][work])
