"""Advantage alignment: an agent's advantages reach into those of the other (arXiv 2406.14662)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import Transform
from maporl.config.schema import AdvantageConfig
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class OpponentShaping(Transform):
    """Advantage alignment (arXiv 2406.14662; with group baselines 2511.19405), for two agents on one grid of turns:

    ``A*_t = A_t + beta (sum_{k<t} gamma^(t-k) A_k) B_t``, where A is the agent's own advantage and B the other's.
    """

    beta: float = option(1.0, "The weight of the other's advantage.")
    gamma: float | None = option(None, "The discount of the sum. Default: that of the returns.")
    extra_gamma: bool = option(False, "Multiply the sum by gamma once more, as the published code does.")
    needs = ("agent", "rollout", "turn")
    needs_untrained_rows = True
    compares_turns = True

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the shaped advantages.

        Raises:
            ValueError: a dialogue does not have exactly two agents that both speak in every turn.
        """
        gamma = config.gamma if self.gamma is None else self.gamma
        agents = batch.column("agent", "post: opponent_shaping")
        turns = batch.column("turn", "post: opponent_shaping")
        result = advantages.clone()
        for rows in batch.groups(batch.dialogues()):
            by_agent = {
                a: {turns[i]: i for i in rows if agents[i] == a} for a in dict.fromkeys(agents[i] for i in rows)
            }
            grids = list(by_agent.values())
            if len(grids) != 2 or grids[0].keys() != grids[1].keys():
                raise ValueError(
                    "post: opponent_shaping needs exactly two agents who both speak in every turn of a dialogue; got "
                    + ", ".join(f"{agent!r} in turns {sorted(grid)}" for agent, grid in by_agent.items())
                )
            for mine, theirs in (grids, grids[::-1]):
                past = torch.zeros((), dtype=advantages.dtype)
                for turn in sorted(mine):
                    weight = past * gamma if self.extra_gamma else past
                    result[mine[turn]] = advantages[mine[turn]] + self.beta * weight * advantages[theirs[turn]]
                    past = gamma * (past + advantages[mine[turn]])
        return result
