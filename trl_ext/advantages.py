"""From scores and log-probabilities to token advantages: the PPO path."""

import torch
from torch import Tensor

from trl_ext import maths
from trl_ext.ppo_options import PPOOptions
from trl_ext.rows import TokenRows


def assign_advantages(rows: TokenRows, options: PPOOptions, has_critic: bool = True) -> dict[str, float]:
    """Fill in ``advantages`` and ``returns`` of annotated ``rows``; returns statistics.

    Token rewards are the KL penalty plus the score at the last action token; GAE runs over each row's action tokens;
    advantages are whitened within each ``rows.group`` (spec: per agent and turn). Without a critic the advantage is
    the whitened return (lambda 1, values 0).
    """
    mask = rows.action_mask
    kl = torch.where(mask, maths.kl_estimate(rows.logprobs, rows.ref_logprobs, options.kl_estimator), 0.0)
    rewards = maths.kl_penalised_rewards(kl, rows.score, mask, options.kl_coef)
    if options.whiten_rewards:
        rewards = _per_group(rewards, rows, shift_mean=False)
    lam = options.lam if has_critic else 1.0
    advantages, rows.returns = maths.gae(rewards, rows.values.to(rewards.dtype), mask, options.gamma, lam)
    rows.advantages = _per_group(advantages, rows, shift_mean=True)
    penalty = -options.kl_coef * kl.sum(1).mean()
    metrics = {
        "objective/entropy": float((-rows.logprobs).sum(1).mean()),
        "objective/scores": float(rows.score.mean()),
        "objective/rlhf_reward": float(penalty + rows.score.mean()),
        "val/explained_variance": _explained_variance(rows.values[mask], rows.returns[mask]),
    }
    if options.kl_coef == 0:  # there is no reference to be far from
        return metrics
    for kind in ("k1", "k3"):
        estimate = torch.where(mask, maths.kl_estimate(rows.logprobs, rows.ref_logprobs, kind), 0.0)
        metrics[f"objective/kl_{kind}"] = float(estimate.sum(1).mean())
    return metrics | {"objective/kl": float(kl.sum(1).mean()), "objective/non_score_reward": float(penalty)}


def _per_group(values: Tensor, rows: TokenRows, shift_mean: bool) -> Tensor:
    result = torch.zeros_like(values)
    for group in rows.group.unique().tolist():
        member = rows.group == group
        result[member] = maths.masked_whiten(values[member], rows.action_mask[member], shift_mean)
    return result


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 is a perfect critic, 0 one no better than the mean."""
    spread = float(returns.float().var(unbiased=False))
    return 1.0 - float((returns - values).float().var(unbiased=False)) / spread if spread > 0 else 0.0
