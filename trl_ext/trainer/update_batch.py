"""The data of one update, from sampling to the optimizer step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_ext.learning.audit import COUNT
from trl_ext.learning.metrics import Metrics
from trl_ext.ppo.batch import Completion, TokenBatch


@dataclass
class UpdateBatch:
    """One batch on its way through the seams of :class:`trl_ext.trainer.loop.PPOLoop`. Each seam fills in its part.

    Args:
        number: the number of the batch in the run, from 1. All random numbers of the batch are drawn from it.
        version: the number of updates that the sampling weights have had. It is ``number - 1`` unless sampling runs
            ahead.
        examples: this process's rows of a data set, or questions of a task.
        completions: the sampled completions, with their scores after scoring. Only trainers of one policy use it.
        token_batches: the rows that each learner is trained on, with old log-probabilities, values and advantages.
        metrics: the statistics of the update.
        counts: what the update counted for the audit of the run, over all processes (:mod:`trl_ext.learning.audit`).
    """

    number: int
    version: int
    examples: list[Any]
    completions: list[Completion] = field(default_factory=list)
    token_batches: dict[str, TokenBatch] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    counts: Metrics = field(default_factory=dict)

    def count(self, metrics: Mapping[str, Metrics]) -> None:
        """Move the counts among the ``metrics`` of learners to :attr:`counts`."""
        for name, measured in metrics.items():
            for key in [key for key in measured if key.startswith(COUNT)]:
                self.counts[f"learner/{name}/{key.removeprefix(COUNT)}"] = measured.pop(key)
