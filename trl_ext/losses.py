"""The loss of one micro-batch: the policy objective, the critic's loss, and the KL and entropy terms.

Each term is averaged over the whole minibatch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_ext import distributed, maths
from trl_ext.metrics import Metrics
from trl_ext.objectives import Objective, aggregation_total, token_weights
from trl_ext.ppo_options import PPOOptions
from trl_ext.token_batch import TokenBatch


@dataclass(frozen=True)
class Totals:
    """The numbers by which sums over a minibatch are divided. They let a minibatch be split into any micro-batches."""

    policy: float
    tokens: int
    values: int

    @classmethod
    def of(cls, rows: TokenBatch, index: Tensor, options: PPOOptions) -> "Totals":
        """Return the totals of the minibatch ``index`` of ``rows``, summed over all processes."""
        mask = rows.sampled_mask[index]
        policy = aggregation_total(mask, rows.weight[index], options.aggregation)
        own = [policy, float(mask.sum()), float(rows.value_mask[index].sum())]
        policy, tokens, values = distributed.all_reduce_sum(own, mask.device)
        return cls(policy, int(tokens), int(values))


def micro_batch_loss(
    rows: TokenBatch, out: Any, totals: Totals, options: PPOOptions, objective: Objective
) -> tuple[Tensor, Metrics]:
    """Return the share of ``rows`` in the minibatch's loss and in its measures. Both add up over micro-batches.

    ``out`` is the learner's output at the sampled tokens of ``rows``: log-probabilities, values or None, entropies or
    None.
    """
    mask = rows.sampled_mask
    new = _spread(out.logprobs, mask)
    losses, measures = objective(new, rows.old_logprobs.to(new.dtype), rows.advantages, mask, options)
    weights = token_weights(mask, rows.weight, totals.policy, options.aggregation)
    if options.engine_tis_cap is not None:
        weights = weights * engine_weights(rows, options.engine_tis_cap)
    policy_loss = (losses * weights).sum()
    loss = torch.zeros_like(policy_loss) if rows.critic_only else policy_loss
    metrics: Metrics = {"policy_loss": float(policy_loss.detach())}
    if options.kl_in == "loss" and options.kl_coef != 0:
        difference = torch.where(mask, new - rows.ref_logprobs, 0.0)
        kl_loss = (maths.kl_estimate(difference, torch.zeros_like(difference), options.kl_estimator) * weights).sum()
        loss = loss if rows.critic_only else loss + options.kl_coef * kl_loss
        metrics["kl_loss"] = float(kl_loss.detach())
    if options.entropy_coef != 0:
        entropy = (_spread(out.entropies, mask) * weights).sum()
        loss = loss if rows.critic_only else loss - options.entropy_coef * entropy
    value_loss, value_clipped = torch.zeros(()), torch.zeros(())
    if out.values is not None:
        here = rows.value_mask[mask]
        terms, clips = maths.value_loss_terms(
            out.values[here],
            rows.values[mask][here],
            rows.returns[mask][here],
            options.cliprange_value,
            options.huber_delta if options.value_loss == "huber" else None,
        )
        value_loss, value_clipped = terms.sum() / totals.values, clips.sum() / totals.values
        loss = loss + options.vf_coef * value_loss
    with torch.no_grad():
        difference = out.logprobs - rows.old_logprobs[mask]
        metrics |= {
            "loss": float(loss),
            "value_loss": float(value_loss),
            "clipped": float(measures["clipfrac"][mask].sum() / totals.tokens),
            "value_clipped": float(value_clipped),
            "approx_kl": float(0.5 * (difference**2).sum() / totals.tokens),
            "ratio": float(measures["ratio"][mask].sum() / totals.tokens),
        }
    return loss, metrics


def engine_weights(rows: TokenBatch, cap: float) -> Tensor:
    """Return truncated importance weights [N, T], at most ``cap``.

    A weight is the trainer's probability of a token before the update, divided by the probability of the engine that
    sampled it (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). It is 1
    where the engine's probability is unknown.
    """
    known = rows.sampled_mask & ~rows.sampler_logprobs.isnan()
    return torch.where(known, torch.exp(rows.old_logprobs - rows.sampler_logprobs).clamp(max=cap), 1.0)


def engine_gap(rows: TokenBatch) -> list[float]:
    """Return sums over the tokens whose engine gave log-probabilities: |trainer - engine|, engine - trainer, and 1."""
    known = rows.sampled_mask & ~rows.sampler_logprobs.isnan()
    difference = (rows.sampler_logprobs - rows.old_logprobs)[known]
    return [float(difference.abs().sum()), float(difference.sum()), float(known.sum())]


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    """Return the values [M] of the sampled tokens as [N, T], with 0 elsewhere. The gradient passes through."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
