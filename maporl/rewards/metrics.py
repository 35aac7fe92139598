"""What rewards say of dialogues: means by name, agent and turn, and which questions have reward variance."""

from maporl.types import Dialogue


def with_reward_variance(dialogues: list[Dialogue]) -> set[int]:
    """The questions with reward variance: those in whose dialogues some agent earned different credits."""
    credits: dict[tuple[int, str], set[float]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if "credit" in u.rewards:
                credits.setdefault((dialogue.prompt, u.agent), set()).add(u.rewards["credit"])
    return {prompt for (prompt, _), values in credits.items() if len(values) > 1}


Sums = dict[str, tuple[float, int]]
"""Of a metric, the sum of its values and how many there are."""


def reward_sums(dialogues: list[Dialogue]) -> Sums:
    """Every named reward, summed over all utterances, those of each agent, and those of each agent and turn."""
    sums: Sums = {}
    for utterance in (u for d in dialogues for u in d.utterances):
        spoken = f"{utterance.agent}/turn_{utterance.turn + 1}"
        for name, value in utterance.rewards.items():
            for key in (name, f"{name}/{utterance.agent}", f"{name}/{spoken}"):
                total, count = sums.get(f"reward/{key}", (0, 0))
                sums[f"reward/{key}"] = (total + value, count + 1)
    return sums


def mean_rewards(parts: list[Sums]) -> dict[str, float]:
    """The means of what :func:`reward_sums` summed, over the dialogues of all ``parts``; of penalties also how many there were."""
    totals: Sums = {}
    for name, (own, number) in (entry for part in parts for entry in part.items()):
        total, count = totals.get(name, (0, 0))
        totals[name] = (total + own, count + number)
    means = {name: total / count for name, (total, count) in totals.items()}
    counts = {f"count/{n.removeprefix('reward/')}": float(c) for n, (_, c) in totals.items() if "/penalty/" in n}
    return means | counts
