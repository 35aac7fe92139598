"""The data of one update, from sampling to the optimizer step."""

from dataclasses import dataclass, field
from typing import Any

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
    """

    number: int
    version: int
    examples: list[Any]
    completions: list[Completion] = field(default_factory=list)
    token_batches: dict[str, TokenBatch] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
