"""Scales: in which unit an advantage is measured.

Slots: ``(advantages, returns, groups, weights, batch, config) -> [N]``; what counts in a statistic: see the baselines.
"""

from typing import Any

import torch
from torch import Tensor

from maporl.advantages.baselines import Groups, weighted_mean
from maporl.advantages.batch import TurnBatch
from maporl.config.schema import AdvantageConfig


def none(advantages: Tensor, returns, groups, weights, batch, config) -> Tensor:
    """As it is."""
    return advantages


def std(advantages: Tensor, returns: Tensor, groups: Groups, weights: Tensor, batch, config: AdvantageConfig) -> Tensor:
    """By the standard deviation of the group's returns. Where the baseline is the critic's, whitened within the group."""
    if config.baseline == "critic":
        return _whiten(advantages, groups, weights, config)
    scaled = torch.zeros_like(advantages)
    for rows in groups:
        scaled[rows] = advantages[rows] / (_spread(returns[rows], weights[rows], config.ddof) + config.eps)
    return scaled


def batch_std(advantages: Tensor, returns, groups, weights: Tensor, batch: TurnBatch, config) -> Tensor:
    """Whitened over the whole batch: the batch's mean taken off, by its standard deviation."""
    return _whiten(advantages, [batch.rows()], weights, config)


def agent_std(advantages: Tensor, returns, groups, weights: Tensor, batch: TurnBatch, config) -> Tensor:
    """Whitened over all that one agent said in the batch, so that no agent is measured by the spread of another's."""
    by_agent = batch.groups(("agent",), "scale: agent_std")
    return _whiten(advantages, by_agent, weights, config)


def _whiten(values: Tensor, groups: Groups, weights: Tensor, config: AdvantageConfig) -> Tensor:
    whitened = torch.zeros_like(values)
    for rows in groups:
        shifted = values[rows] - weighted_mean(values[rows], weights[rows])
        whitened[rows] = shifted / (_spread(values[rows], weights[rows], config.ddof) + config.eps)
    return whitened


def _spread(values: Tensor, weights: Tensor, ddof: int) -> Tensor:
    centred = values - weighted_mean(values, weights)
    variance = (weights * centred**2).sum() / (weights.sum() - ddof).clamp(min=1e-12)
    return variance.sqrt()


SCALES: dict[str, Any] = {"none": none, "std": std, "batch_std": batch_std, "agent_std": agent_std}
