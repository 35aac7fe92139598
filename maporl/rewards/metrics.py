"""Statistics of rewards: means by name, agent and turn, and which questions have reward variance."""

from collections.abc import Collection, Sequence
from statistics import fmean

from maporl.rounding import differ
from maporl.types import Dialogue


def with_reward_variance(dialogues: list[Dialogue]) -> set[int]:
    """Return the questions that have reward variance: some agent earned different credits in their dialogues."""
    credits: dict[tuple[int, str], list[float]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if "credit" in u.rewards:
                credits.setdefault((dialogue.prompt, u.agent), []).append(u.rewards["credit"])
    return {prompt for (prompt, _), values in credits.items() if differ(values)}


Sums = dict[str, tuple[float, int]]
"""For each metric, the sum of its values and their number."""


def reward_sums(dialogues: list[Dialogue]) -> Sums:
    """Sum every named reward over all utterances, over those of each agent, and over those of each agent and turn."""
    sums: Sums = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            for name, value in u.rewards.items():
                for key in (name, f"{name}/{u.agent}", f"{name}/{u.agent}/turn_{u.turn + 1}"):
                    total, count = sums.get(f"reward/{key}", (0, 0))
                    sums[f"reward/{key}"] = (total + value, count + 1)
    return sums


def mean_rewards(parts: Sequence[Sums]) -> dict[str, float]:
    """Return the means of the rewards in ``parts``, each a result of :func:`reward_sums`, over all dialogues.

    For penalties, also return how many there were.
    """
    totals: Sums = {}
    for part in parts:
        for name, (added, number) in part.items():
            total, count = totals.get(name, (0, 0))
            totals[name] = (total + added, count + number)
    means = {name: total / count for name, (total, count) in totals.items()}
    counts = {f"count/{n.removeprefix('reward/')}": float(c) for n, (_, c) in totals.items() if "/penalty/" in n}
    return means | counts


def shares_right(verdicts: Collection[tuple[bool, bool | None]]) -> list[float]:
    """Return the share of verdicts that are right, among those that should be True and then among the others.

    A verdict is what it should be, and what it is. None is never right. A side without any verdict is left out. The
    mean of both is the balanced accuracy, which says nothing at 0.5 however rare one side is.
    """
    sides = [[said is ideal for wanted, said in verdicts if wanted is ideal] for ideal in (True, False)]
    return [fmean(side) for side in sides if side]
