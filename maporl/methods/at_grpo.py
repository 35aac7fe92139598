"""AT-GRPO: the groups that earn least are left out, as in its published code (PettingLLMs)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import Transform
from maporl.rounding import ROUNDING, mean_rank
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class DropGroups(Transform):
    """Leave out the ``share`` of the groups whose mean reward is lowest (AT-GRPO, PettingLLMs' ``filter_method:
    mean``).

    The rows with equal ``key`` are a group, as in ``advantage.key``. Each policy's groups are ranked over the whole
    batch, on all processes. A KL in the reward does not count in their means. Their number times ``share`` is rounded
    down. Of groups with equal means the one goes first whose key comes first. All rows of a group stay, or none. Those
    that are left out count in no statistic.

    It keeps what is nearly solved and leaves out what is still too hard, whether or not the rewards of a group differ.
    To leave out groups from which nothing is to be learned, use ``drop_zeros``.

    Raises:
        ValueError: ``share`` is not from 0 to below 1, or ``key`` names no column.
    """

    key: tuple[str, ...] = option(("prompt",), "The columns whose rows form a group, as in `advantage.key`.")
    share: float = option(0.5, "The share of the groups that is left out.")
    drops = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.key:
            raise ValueError(
                "key: expected the columns whose rows form a group, such as [prompt], got [], by which all rows are "
                "one group"
            )
        if not 0 <= self.share < 1:
            raise ValueError(f"share: expected a number from 0 to below 1, got {self.share}")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # it follows from the options
        """The columns that it needs."""
        return self.key

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return 0 for the rows that are left out, and 1 for the others.

        Raises:
            ValueError: a column was not recorded.
        """
        weights = torch.ones(len(batch), dtype=torch.float64)
        by_policy: dict[Any, list[list[int]]] = {}
        policy_key = () if batch.policy is None else ("policy",)
        for rows in batch.groups((*policy_key, *self.key), "post: drop_groups"):
            by_policy.setdefault(None if batch.policy is None else batch.policy[rows[0]], []).append(rows)
        for groups in by_policy.values():
            groups.sort(key=lambda rows: self._rank(batch, rows))
            # 100 groups times 0.29 are 29, but less in float64
            for rows in groups[: math.floor(len(groups) * self.share * (1 + ROUNDING))]:
                weights[rows] = 0.0
        return weights

    def _rank(self, batch: TurnBatch, rows: Sequence[int]) -> tuple:
        names = [batch.column(name, "post: drop_groups")[rows[0]] for name in self.key]
        # numbers by their size and all else by its text, because a column may hold both
        keys = [(0, name, "") if isinstance(name, int | float) else (1, 0, str(name)) for name in names]
        return (mean_rank([batch.earned[i] for i in rows]), *keys)
