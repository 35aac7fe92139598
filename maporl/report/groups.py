"""What the processes of each group did in the last updates, and which of them the others wait for (``cluster.backend:
ray``)."""

import re
from dataclasses import dataclass
from typing import Any

from maporl.report.charts import finite
from maporl.report.read import Run

LAST = 20
"""How many updates are shown: the newest."""
KINDS = ("learning", "sampling", "sending", "saving", "dead", "idle")
"""What processes do, in the order in which it is drawn."""
_SECONDS = re.compile(
    r"group/(?P<group>[^/]+)/(?P<part>learner|engines)/(?P<what>learning|sampling|sending|saving|dead)"
)
_SAYS = {
    "learner": {"learning": "learns", "sending": "sends weights", "saving": "saves", "dead": "is dead"},
    "engines": {"sampling": "sample", "sending": "take over weights", "dead": "are dead"},
}
_REMEDY = {
    "learning": "Learning sets the pace: a larger cluster.groups.{group}.learner.devices shortens an update.",
    "sampling": "Sampling sets the pace: a larger cluster.groups.{group}.engines.replicas shortens an update.",
    "sending": "Sending weights sets the pace: adapters (lora) have fewer weights to send.",
    "saving": "Saving sets the pace: training.async_save writes while training goes on, and training.save_steps saves less often.",  # noqa: E501
    "dead": "Processes that die set the pace: the folder logs/ has what they printed.",
}


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
        "bottleneck": bottleneck(parts),
    }


def bottleneck(parts: list[Bar]) -> str:
    """Which processes the others wait for, in words, and what would help."""
    shares = {(bar.group, bar.part): bar.shares() for bar in parts}
    busy: dict[str, float] = {}
    for (group, _), spent in shares.items():
        busy[group] = busy.get(group, 0.0) + 1 - spent["idle"]
    if max(busy.values()) < 0.5:
        most = max(busy, key=lambda group: busy[group])
        return (
            f"The processes of every group are idle more than half of the time; those of {most} work {busy[most]:.0%} "
            "of it. The driver sets the pace: the chart of seconds per update says with what."
        )
    slowest = min(shares, key=lambda key: shares[key]["idle"])
    group, part = slowest
    what = max(_SAYS[part], key=lambda kind: shares[slowest][kind])
    who = f"Group {group}" if part == "learner" else f"The engines of {group}"
    told = f"{who} {_SAYS[part][what]} {shares[slowest][what]:.0%} of the time"
    others = [key for key in shares if key != slowest]
    if others:
        idlest = max(others, key=lambda key: shares[key]["idle"])
        theirs = f"the learner of {idlest[0]} is" if idlest[1] == "learner" else f"the engines of {idlest[0]} are"
        told += f", while {theirs} idle {shares[idlest]['idle']:.0%} of it"
    return f"{told}. {_REMEDY[what].format(group=group)}"
