"""MATPO: what was called gets the advantage of its caller (arXiv 2510.04678)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import Transform
from maporl.config.schema import AdvantageConfig


@dataclass(frozen=True)
class BroadcastToCallees(Transform):
    """Only utterances that nobody called are compared; what they called gets their advantage (MATPO, arXiv 2510.04678).

    The advantage is one number for an utterance, spread over that utterance's own tokens.
    """

    needs = ("caller",)
    trains_callees = True

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return 0 for utterances that were called, so that they count in no statistic."""
        callers = batch.column("caller", "post: broadcast_to_callees")
        return torch.tensor([float(caller is None or caller < 0) for caller in callers], dtype=torch.float64)

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Give each called utterance the advantage of its caller, also through several calls.

        Raises:
            ValueError: callers were not recorded.
        """
        callers = batch.column("caller", "post: broadcast_to_callees")
        result = advantages.clone()
        for i in batch.rows():
            root = i
            while callers[root] is not None and callers[root] >= 0:
                root = callers[root]
            result[i] = advantages[root]
        return result
