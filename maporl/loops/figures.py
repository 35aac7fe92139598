"""What a round of a loop measures, under the names of ``maporl.report.metric_panels``."""

from collections.abc import Mapping, Sequence
from typing import Any

from maporl.evaluation.metrics import SCORE, Evaluation
from maporl.report.audit import dialogue_counts
from maporl.rollout.player import evaluate_everywhere
from maporl.types import Dialogue
from trl_ext.learning.audit import COUNT


def round_metrics(
    dialogues: Sequence[Dialogue], stages: Sequence[Mapping[str, Any]], held_out: Evaluation | None
) -> dict[str, float]:
    """Return the numbers of a round as a flat dict.

    Args:
        dialogues: what was sampled, graded and scored.
        stages: what the manifest of each stage says of each policy.
        held_out: the evaluation after the round.
    """
    metrics = evaluate_everywhere(list(dialogues)).metrics() | lengths(dialogues)
    for number, stage in enumerate(stages, 1):
        for policy, about in stage.items():
            numbers = {key: value for key, value in about.items() if isinstance(value, int | float)}
            metrics |= {f"{policy}/stage_{number}/{key}": float(value) for key, value in numbers.items()}
    counts = dialogue_counts(dialogues)
    for policy in dict.fromkeys(policy for stage in stages for policy in stage if policy != "reward_model"):
        learned = [about.get("rows") or about.get("dialogues") or 0 for s in stages if (about := s.get(policy))]
        counts |= {f"learner/{policy}/rounds": 1, f"learner/{policy}/rows": sum(learned)}
    metrics |= {COUNT + name: float(number) for name, number in counts.items()}
    if held_out is not None:
        metrics |= {f"eval_{name}": value for name, value in held_out.metrics().items()}
    return metrics


def held_out_score(held_out: Evaluation) -> float:
    """Return the accuracy of the last answers, or without labels the mean score; 0 if that is not measured."""
    return held_out.final().value if held_out.final().total else held_out.rewards.get(SCORE, 0.0)


def lengths(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return the mean number of sampled tokens of each policy's answers, and the share that was cut off.

    An answer that dialogues share counts once.
    """
    said: dict[str, dict[Any, tuple[int, bool]]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if u.response_ids:
                key = (dialogue.prompt, u.sample) if u.sample is not None else (dialogue.prompt, dialogue.rollout, u.id)
                said.setdefault(u.policy, {})[key] = len(u.response_ids), not u.stop.whole
    metrics = {}
    for policy, answers in said.items():
        for name, column in (("mean_length", 0), ("clipped_ratio", 1)):
            numbers = [answer[column] for answer in answers.values()]
            metrics[f"{policy}/completions/{name}"] = sum(numbers) / len(numbers)
    return metrics
