"""What one update works on, from sampling to the optimizer's step."""

from dataclasses import dataclass, field
from typing import Any

from trl_ext.metrics import Metrics
from trl_ext.token_batch import Completion, TokenBatch


@dataclass
class UpdateBatch:
    """One batch on its way through the seams of :class:`trl_ext.loop.PPOLoop`; each seam fills in its part.

    Args:
        number: which batch of the run this is, from 1. Whatever is drawn at random for it depends on this number.
        version: how many updates the weights had had when it was sampled; ``number - 1`` unless sampling runs ahead.
        examples: what this process asks of the policy: rows of a data set, or questions of a task.
        completions: what was sampled, and after scoring each one's scalar score (trainers of one policy).
        token_batches: by learner, what it is trained on: token rows with old log-probabilities, values and advantages.
        metrics: what was measured on the way.
    """

    number: int
    version: int
    examples: list[Any]
    completions: list[Completion] = field(default_factory=list)
    token_batches: dict[str, TokenBatch] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
