"""Scales: the number by which an advantage is divided.

Every scale is a function ``(advantages, returns, groups, weights, batch, config) -> [N]``. ``groups`` and ``weights``
are those of :mod:`maporl.advantages.baselines`.
"""

from typing import Any

import torch
from torch import Tensor

from maporl.advantages.baselines import Groups, all_equal, baseline_of, weighted_mean, without_rounding
from maporl.advantages.batch import TurnBatch
from maporl.advantages.slots import Scale, find
from maporl.config.schema import AdvantageConfig


def none(advantages: Tensor, returns, groups, weights, batch, config) -> Tensor:
    """Return the advantages unchanged."""
    return advantages


def std(advantages: Tensor, returns: Tensor, groups: Groups, weights: Tensor, batch, config: AdvantageConfig) -> Tensor:
    """Divide by the standard deviation of the group's returns.

    If the baseline is a critic's value, whiten within the group instead. A group of equal returns gets 0, whatever the
    baseline is.
    """
    if baseline_of(config).needs_critic:
        return whiten(advantages, groups, weights, config)
    scaled = torch.zeros_like(advantages)
    for rows in groups:
        scaled[rows] = _divided(advantages[rows], returns[rows], weights[rows], config)
    return scaled


def batch_std(advantages: Tensor, returns, groups, weights: Tensor, batch: TurnBatch, config) -> Tensor:
    """Whiten over the whole batch: subtract the mean of the batch and divide by its standard deviation."""
    return whiten(advantages, [batch.rows()], weights, config)


def raw_std(advantages: Tensor, returns: Tensor, groups, weights: Tensor, batch: TurnBatch, config) -> Tensor:
    """Divide by the standard deviation of all returns of the batch, before a baseline was subtracted.

    Lite PPO (arXiv 2508.08221) does this: a group that is nearly solved keeps its small spread. ``batch_std`` differs:
    it takes the spread of advantages, and subtracts their mean once more.
    """
    rows = batch.rows()
    scaled = torch.zeros_like(advantages)
    scaled[rows] = _divided(advantages[rows], returns[rows], weights[rows], config)
    return scaled


def agent_std(advantages: Tensor, returns, groups, weights: Tensor, batch: TurnBatch, config) -> Tensor:
    """Whiten over all utterances of one agent in the batch, so that one agent's spread does not affect another agent.

    Raises:
        ValueError: agents were not recorded.
    """
    by_agent = batch.groups(("agent",), "scale: agent_std")
    return whiten(advantages, by_agent, weights, config)


def token_std(advantages: Tensor, returns, groups: Groups, weights: Tensor, batch: TurnBatch, config) -> Tensor:
    """Whiten over the sampled tokens of the group, so that a long answer counts more in the statistics than a short
    one.

    REINFORCE++ (arXiv 2501.03262) and CoMAS (arXiv 2510.08529) do this over all tokens of an agent. A mean over answers
    differs from it as soon as answers differ in length.

    Raises:
        ValueError: the numbers of tokens were not recorded.
    """
    return whiten(advantages, groups, weights * batch.tensor(batch.column("tokens", "scale: token_std")), config)


def whiten(values: Tensor, groups: Groups, weights: Tensor, config: AdvantageConfig) -> Tensor:
    """Return ``values`` minus the weighted mean of their group, divided by the standard deviation of the group.

    A group whose values are all equal, but for rounding, gets exactly 0.
    """
    whitened = torch.zeros_like(values)
    for rows in groups:
        shifted = without_rounding(values[rows] - weighted_mean(values[rows], weights[rows]), values[rows])
        whitened[rows] = _divided(shifted, values[rows], weights[rows], config)
    return whitened


def _divided(advantages: Tensor, values: Tensor, weights: Tensor, config: AdvantageConfig) -> Tensor:
    """Return ``advantages`` divided by the spread of ``values``, and 0 if these are equal but for rounding."""
    if all_equal(values[weights > 0]):
        return torch.zeros_like(advantages)
    return advantages / (_spread(values, weights, config.ddof) + config.eps)


def _spread(values: Tensor, weights: Tensor, ddof: int) -> Tensor:
    centred = values - weighted_mean(values, weights)
    variance = (weights * centred**2).sum() / (weights.sum() - ddof).clamp(min=1e-12)
    return variance.sqrt()


SCALES: dict[str, Any] = {
    "none": Scale(none),
    "std": Scale(std, over="group"),
    "batch_std": Scale(batch_std, over="batch"),
    "raw_std": Scale(raw_std, over="batch"),
    "agent_std": Scale(agent_std, over="agent", needs=("agent",)),
    "token_std": Scale(token_std, over="group", needs=("tokens",)),
}


def scale_of(config: AdvantageConfig, where: str = "scale") -> Scale:
    """Return the scale that a configuration names.

    Raises:
        ValueError: the name is unknown.
    """
    return find(SCALES, Scale, config.scale, where)
