"""Statistics of rewards: means by name, agent and turn, and which questions have reward variance."""

from maporl.types import Dialogue


def telling(dialogues: list[Dialogue]) -> set[int]:
    """Return the questions that have reward variance: some agent earned different credits in their dialogues.

    Other questions give a group baseline no gradient.
    """
    credits: dict[tuple[int, str], set[float]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if "credit" in u.rewards:
                credits.setdefault((dialogue.prompt, u.agent), set()).add(u.rewards["credit"])
    return {prompt for (prompt, _), values in credits.items() if len(values) > 1}


def mean_rewards(dialogues: list[Dialogue]) -> dict[str, float]:
    """Return the mean of every named reward: over all utterances, per agent, and per agent and turn.

    For penalties, also return how many there were.
    """
    sums: dict[str, list[float]] = {}
    for utterance in (u for d in dialogues for u in d.utterances):
        spoken = f"{utterance.agent}/turn_{utterance.turn + 1}"
        for name, value in utterance.rewards.items():
            for key in (name, f"{name}/{utterance.agent}", f"{name}/{spoken}"):
                sums.setdefault(f"reward/{key}", []).append(value)
    means = {name: sum(values) / len(values) for name, values in sums.items()}
    counts = {f"count/{n.removeprefix('reward/')}": float(len(v)) for n, v in sums.items() if "/penalty/" in n}
    return means | counts
