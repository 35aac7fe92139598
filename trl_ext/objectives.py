"""Policy losses, per token. ``OBJECTIVES`` names them all.

An objective is ``(new, old, advantages, mask, options) -> (losses, measures)``: log-probabilities and advantages [N, T]
with a boolean mask, the loss of every token [N, T], and named values [N, T] of which the token mean is logged. How losses
are averaged is ``options.aggregation``'s business (:func:`token_weights`), so that no objective repeats it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_ext.ppo_options import PPOOptions

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, PPOOptions], tuple[Tensor, dict[str, Tensor]]]


def importance_ratio(new: Tensor, old: Tensor, mask: Tensor, kind: str) -> Tensor:
    """``pi_new / pi_old`` [N, T]: of each token, or the same number at every token of an answer.

    ``sequence`` is the product over the answer's tokens (M-GRPO, arXiv 2511.13288, eq. 14), ``sequence_mean`` its
    length-normalised form ``exp(mean log-ratio)`` (GSPO, arXiv 2507.18071).
    """
    # masked before exp: log-probabilities outside the mask may be anything
    difference = torch.where(mask, new - old, torch.zeros_like(new))
    if kind == "token":
        return torch.exp(difference)
    total = difference.sum(1, keepdim=True)
    if kind == "sequence_mean":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.exp(total).expand_as(new)


def ppo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7): ``max(-A r, -A clamp(r, 1 - low, 1 + high))``.

    With ``dual_clip`` c (Ye et al. 2020), where A < 0 it is at most ``-c A``, so that a huge ratio cannot blow it up.
    """
    ratio = importance_ratio(new, old, mask, options.ratio)
    high = options.cliprange if options.cliprange_high is None else options.cliprange_high
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - options.cliprange, 1.0 + high)
    losses = torch.max(plain, clipped)
    if options.dual_clip is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * options.dual_clip), losses)
    return losses, {"clipfrac": (clipped > plain).to(losses.dtype), "ratio": ratio.detach()}


def reinforce(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions):
    """``-A log pi`` (Williams 1992). With ``tis_cap`` c each term is weighed by ``min(r, c)``, held constant (truncated
    importance sampling), which allows several steps on one batch; without it use one."""
    ratio = importance_ratio(new, old, mask, options.ratio).detach()
    weight = torch.ones_like(ratio) if options.tis_cap is None else ratio.clamp(max=options.tis_cap)
    losses = -advantages * weight * torch.where(mask, new, torch.zeros_like(new))
    return losses, {"clipfrac": (ratio > weight).to(losses.dtype) if options.tis_cap else weight * 0, "ratio": ratio}


OBJECTIVES: dict[str, Any] = {"ppo": ppo, "reinforce": reinforce}


def token_weights(mask: Tensor, rows: Tensor, total: float, aggregation: str) -> Tensor:
    """What each token's loss is multiplied with [N, T] before they are summed; ``rows`` [N] weighs whole answers.

    ``total`` is :func:`aggregation_total` of the minibatch, so that the sum over its parts is the mean over all of it.
    """
    weights = rows.unsqueeze(1) * mask
    if aggregation in ("sequence_mean", "per_main_rollout"):
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    return weights / total


def aggregation_total(mask: Tensor, rows: Tensor, aggregation: str) -> float:
    """Tokens for a token mean, else answers, each by its weight."""
    return float((rows * mask.sum(1)).sum() if aggregation == "token_mean" else rows.sum())
