"""What an agent contributed to a dialogue, by what the dialogue is worth without it. Pure Python, no torch.

:mod:`maporl.rollout.ablation` plays a dialogue again without some of its agents. The worth of a dialogue is its last
score.
"""

from collections.abc import Mapping
from itertools import combinations
from math import factorial
from statistics import fmean

from maporl.errors import ConfigError
from maporl.rounding import difference
from maporl.types import Dialogue

Worths = dict[frozenset[str], float]
"""What a dialogue is worth without each group of agents: the mean over the dialogues that were played so."""


def set_contributions(dialogues: list[Dialogue]) -> None:
    """Set ``rewards["marginal"]`` and ``rewards["shapley"]`` of the utterances of agents that were left out.

    ``marginal`` is the worth of the dialogue minus its worth without the agent (SHARP, arXiv 2602.08335). ``shapley``
    is the agent's Shapley value. It is given if the dialogue was played without every group of these agents. Marginal
    contributions do not add up to what the agents are worth together; Shapley values do.

    Raises:
        ConfigError: nobody answered in an ablation, so it has no worth.
    """
    for dialogue in (d for d in dialogues if d.ablations):
        without = worths_without(dialogue)
        whole = worth(dialogue)
        agents = sorted(frozenset[str]().union(*without))
        parts = {
            "marginal": {a: difference(whole, without[frozenset([a])]) for a in agents if frozenset([a]) in without}
        }
        if len(without) == 2 ** len(agents) - 1:
            everybody = frozenset(agents)
            parts["shapley"] = shapley_values({everybody: whole} | {everybody - out: v for out, v in without.items()})
        for name, values in parts.items():
            for utterance in (u for u in dialogue.utterances if u.agent in values):
                utterance.rewards[name] = values[utterance.agent]


def shapley_values(worths: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Return the Shapley value of each agent. ``worths`` has the worth of every group of agents, the empty one too.

    It is the agent's mean marginal contribution over all orders in which the agents may join: ``sum over S without i of
    |S|! (n - |S| - 1)! / n! (v(S + i) - v(S))``. The values add up to what all agents are worth together, minus what
    nobody is worth.

    >>> worth = {"": 0, "a": 0.2, "b": 0.1, "ab": 0.6}
    >>> {k: round(v, 3) for k, v in shapley_values({frozenset(k): v for k, v in worth.items()}).items()}
    {'a': 0.35, 'b': 0.25}
    """
    agents = sorted(frozenset[str]().union(*worths))
    n = len(agents)
    values = {}
    for agent in agents:
        others = [other for other in agents if other != agent]
        values[agent] = sum(
            factorial(size)
            * factorial(n - size - 1)
            / factorial(n)
            * difference(worths[joined | {agent}], worths[joined])
            for size in range(n)
            for joined in map(frozenset, combinations(others, size))
        )
    return values


def worths_without(dialogue: Dialogue) -> Worths:
    """Return what ``dialogue`` is worth without each group of agents that was left out of it.

    Raises:
        ConfigError: nobody answered in an ablation, so it has no worth.
    """
    worths: dict[frozenset[str], list[float]] = {}
    for ablation in dialogue.ablations:
        worths.setdefault(frozenset(ablation.without), []).append(worth(ablation))
    return {group: fmean(values) for group, values in worths.items()}


def worth(dialogue: Dialogue) -> float:
    """Return the last score of ``dialogue``.

    Raises:
        ConfigError: none of its utterances has a score.
    """
    scores = [u.rewards["score"] for u in dialogue.utterances if "score" in u.rewards]
    if not scores:
        raise ConfigError(
            f"branching.ablate: without {', '.join(dialogue.without) or 'anybody left out'} nobody answers question "
            f"{dialogue.example.id}, so the dialogue has no score; take agents that answer out of who, or give a "
            "placeholder"
        )
    return scores[-1]
