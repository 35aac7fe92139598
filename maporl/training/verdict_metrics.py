"""What an update's dialogues show of a judge of steps: whether its verdicts follow the outcome. Imports no torch."""

from collections.abc import Sequence
from statistics import fmean

from maporl.rewards.labels import is_step_verdict
from maporl.rewards.metrics import shares_right
from maporl.types import Dialogue
from trl_ext.process import distributed


def verdict_metrics(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return how the verdicts of ``protocol.step_judge`` were, over all processes, or nothing without any.

    A dialogue succeeds if the last score of what was judged is above 0. Where most dialogues fail, a judge that calls
    every step bad mostly follows the outcome. So the accuracy is the mean of the share of steps of successes that were
    called good, and of the share of steps of failures that were called bad. At 0.5 the verdicts say nothing of the
    outcome. All processes call this together.
    """
    verdicts = [(_succeeds(d), u.tags["verdict"]) for d in dialogues for u in d.utterances if is_step_verdict(u)]
    made = distributed.all_gather_lists(verdicts)
    if not made:
        return {}
    metrics = {"verdicts/unreadable": fmean(said is None for _, said in made)}
    read = [(succeeds, said == 1) for succeeds, said in made if said is not None]
    if read:
        metrics["verdicts/good"] = fmean(good for _, good in read)
    if len(right := shares_right(read)) == 2:
        metrics["verdicts/balanced_accuracy"] = fmean(right)
    return metrics


def _succeeds(dialogue: Dialogue) -> bool:
    scores = [u.rewards["score"] for u in dialogue.utterances if not is_step_verdict(u) and "score" in u.rewards]
    return bool(scores) and scores[-1] > 0
