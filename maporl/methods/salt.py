"""SALT: the same action in the same state earns the same in all dialogues of a prompt (arXiv 2510.20022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import Transform
from maporl.config.schema import AdvantageConfig


@dataclass(frozen=True)
class StepMerge(Transform):
    """SALT (arXiv 2510.20022), as reconstructed from its abstract: the same action in the same state in several
    dialogues of one prompt gets the mean of their advantages, because it cannot be the reason why they differ.

    An action is a move or an answer, however it is worded, and a state is what a player is shown. Each dialogue counts
    once in a mean, however often it comes back to the state.
    """

    needs = ("state",)

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the mean over rows with equal (prompt, agent, state, action), of those that are recorded.

        Raises:
            ValueError: states were not recorded.
        """
        result = advantages.clone()
        key = [name for name in ("prompt", "agent", "state", "action") if getattr(batch, name) is not None]
        if batch.state is None:
            batch.column("state", "post: step_merge")
        merged: dict[tuple, list[list[int]]] = {}
        for rows in batch.groups((*key, *batch.dialogues())):
            merged.setdefault(tuple(getattr(batch, name)[rows[0]] for name in key), []).append(rows)
        for dialogues in merged.values():
            mean = torch.stack([advantages[rows].mean() for rows in dialogues]).mean()
            for rows in dialogues:
                result[rows] = mean
        return result
