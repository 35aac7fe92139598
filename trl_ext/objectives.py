"""Policy losses for each token. ``OBJECTIVES`` names them all.

An objective is a function ``(new, old, advantages, mask, options) -> (losses, measures)``. It receives new and old
log-probabilities and advantages [N, T] with a boolean mask. It returns the loss of every token [N, T] and named values
[N, T], of which the trainer logs the token mean. ``options.aggregation`` decides how the losses are averaged
(:func:`token_weights`), so no objective repeats that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl_ext.ppo_options import PPOOptions

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, PPOOptions], tuple[Tensor, dict[str, Tensor]]]


def importance_ratio(new: Tensor, old: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Return ``pi_new / pi_old`` [N, T], for each token or as one number for all tokens of an answer.

    ``token`` is the ratio of each token. ``sequence`` is the product over the answer's tokens (M-GRPO, arXiv
    2511.13288, eq. 14). ``sequence_mean`` is its length-normalised form ``exp(mean log-ratio)`` (GSPO, arXiv
    2507.18071).
    """
    # mask before exp, because log-probabilities outside the mask may have any value
    difference = torch.where(mask, new - old, torch.zeros_like(new))
    if kind == "token":
        return torch.exp(difference)
    total = difference.sum(1, keepdim=True)
    if kind == "sequence_mean":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.exp(total).expand_as(new)


def ppo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7): ``max(-A r, -A clamp(r, 1 - low, 1 + high))``.

    With ``dual_clip`` c (Ye et al. 2020) the loss is at most ``-c A`` where A < 0. Otherwise a huge ratio would make
    the loss huge.
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
    """REINFORCE: ``-A log pi`` (Williams 1992).

    With ``tis_cap`` c each term has the weight ``min(r, c)``, which is held constant (truncated importance sampling).
    This allows several steps on one batch. Without it, take one step.
    """
    ratio = importance_ratio(new, old, mask, options.ratio).detach()
    weight = torch.ones_like(ratio) if options.tis_cap is None else ratio.clamp(max=options.tis_cap)
    losses = -advantages * weight * torch.where(mask, new, torch.zeros_like(new))
    return losses, {"clipfrac": (ratio > weight).to(losses.dtype) if options.tis_cap else weight * 0, "ratio": ratio}


OBJECTIVES: dict[str, Any] = {"ppo": ppo, "reinforce": reinforce}


def token_weights(mask: Tensor, rows: Tensor, total: float, aggregation: str) -> Tensor:
    """Return the weight of each token's loss [N, T] in the sum over tokens. ``rows`` [N] are the weights of whole
    answers.

    ``total`` is :func:`aggregation_total` of the minibatch, so that the sum over its micro-batches is its mean.
    """
    weights = rows.unsqueeze(1) * mask
    if aggregation in ("sequence_mean", "per_main_rollout"):
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    return weights / total


def aggregation_total(mask: Tensor, rows: Tensor, aggregation: str) -> float:
    """Return the weighted number of tokens for a token mean, and the weighted number of answers otherwise."""
    return float((rows * mask.sum(1)).sum() if aggregation == "token_mean" else rows.sum())
