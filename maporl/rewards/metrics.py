"""What rewards say of dialogues: means by name, agent and turn, and which questions tell their dialogues apart."""

from maporl.types import Dialogue


def telling(dialogues: list[Dialogue]) -> set[int]:
    """The questions in whose dialogues some agent earned different credits."""
    credits: dict[tuple[int, str], set[float]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if "credit" in u.rewards:
                credits.setdefault((dialogue.prompt, u.agent), set()).add(u.rewards["credit"])
    return {prompt for (prompt, _), values in credits.items() if len(values) > 1}


def mean_rewards(dialogues: list[Dialogue]) -> dict[str, float]:
    """The mean of every named reward: over all utterances, for each agent, and for each agent and turn; of penalties
    also how many there were."""
    sums: dict[str, list[float]] = {}
    for utterance in (u for d in dialogues for u in d.utterances):
        spoken = f"{utterance.agent}/turn_{utterance.turn + 1}"
        for name, value in utterance.rewards.items():
            for key in (name, f"{name}/{utterance.agent}", f"{name}/{spoken}"):
                sums.setdefault(f"reward/{key}", []).append(value)
    means = {name: sum(values) / len(values) for name, values in sums.items()}
    counts = {f"count/{n.removeprefix('reward/')}": float(len(v)) for n, v in sums.items() if "/penalty/" in n}
    return means | counts
