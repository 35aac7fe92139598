"""How old the weights were that sampled an update's dialogues (``async_depth``). Imports no torch."""

from collections.abc import Sequence

from maporl.types import Dialogue
from trl_ext.learning.metrics import Metrics


def staleness_metrics(dialogues: Sequence[Dialogue], update: int) -> Metrics:
    """Return the ages of the answers that update number ``update`` trains on, in updates.

    An answer's age is ``update - 1`` less the number of updates that its weights had had. To a policy, its partners are
    a part of the environment: their age does not enter its probability ratio, and is a metric of its own.
    """
    answer_ages: dict[str, list[int]] = {}
    partners: dict[str, list[int]] = {}
    across = 0
    for dialogue in dialogues:
        ages = [(u.policy, update - 1 - u.version) for u in dialogue.utterances if u.version is not None]
        across += len({age for _, age in ages}) > 1
        for policy in {name for name, _ in ages}:
            answer_ages.setdefault(policy, []).extend(age for name, age in ages if name == policy)
            others = [age for name, age in ages if name != policy]
            partners.setdefault(policy, []).extend([max(others)] if others else [])
    metrics: Metrics = {"async/across_updates": across / max(len(dialogues), 1)}
    for policy, ages_of_answers in answer_ages.items():
        metrics[f"{policy}/policy/staleness"] = _mean(ages_of_answers)
        metrics[f"{policy}/policy/staleness_max"] = float(max(ages_of_answers))
        if partners[policy]:
            metrics[f"{policy}/policy/partner_lag"] = _mean(partners[policy])
    return metrics


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)
