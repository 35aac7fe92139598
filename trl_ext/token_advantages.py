"""From scores and log-probabilities to token advantages: the PPO path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_ext import maths
from trl_ext.ppo_options import PPOOptions
from trl_ext.token_batch import TokenBatch


def assign_advantages(rows: TokenBatch, options: PPOOptions, has_critic: bool = True) -> dict[str, float]:
    """Fill in ``advantages`` and ``returns`` of annotated ``rows``; returns statistics.

    Token rewards are the KL penalty plus the score at the last action token; GAE runs over each row's action tokens;
    advantages are whitened within each ``rows.group`` (spec: per agent and turn). Without a critic the advantage is
    the whitened return (lambda 1, values 0).
    """
    token_gae(rows, options, has_critic)
    metrics = row_metrics(rows, options)
    whiten_groups([rows])
    return metrics


def token_gae(rows: TokenBatch, options: PPOOptions, has_critic: bool) -> None:
    """Fill in ``advantages``, not yet whitened, and ``returns`` by GAE within each row; without a critic, lambda is 1."""
    rewards = token_rewards(rows, options)
    if options.whiten_rewards:
        rewards = _whitened([rewards], [rows], shift_mean=False)[0]
    lam = options.lam if has_critic else 1.0
    values = rows.values.to(rewards.dtype)
    rows.advantages, rows.returns = maths.gae(rewards, values, rows.sampled_mask, options.gamma, lam)


def token_rewards(rows: TokenBatch, options: PPOOptions) -> Tensor:
    """[N, T]: the KL penalty, where it goes into the rewards, and the score at the last action token."""
    kl_coef = options.kl_coef if options.kl_in == "reward" else 0.0
    return maths.kl_penalised_rewards(token_kl(rows, options.kl_estimator), rows.score, rows.sampled_mask, kl_coef)


def token_kl(rows: TokenBatch, estimator: str) -> Tensor:
    """The estimate of the KL to the reference at every action token [N, T], 0 elsewhere."""
    return torch.where(rows.sampled_mask, maths.kl_estimate(rows.old_logprobs, rows.ref_logprobs, estimator), 0.0)


def whiten_groups(pieces: Sequence[TokenBatch]) -> None:
    """Whiten ``advantages`` within each ``group``, over the action tokens of all ``pieces`` (of several policies)."""
    for rows, whitened in zip(pieces, _whitened([r.advantages for r in pieces], pieces), strict=True):
        rows.advantages = whitened


def _whitened(values: Sequence[Tensor], pieces: Sequence[TokenBatch], shift_mean: bool = True) -> list[Tensor]:
    results = [torch.zeros_like(v) for v in values]
    for group in torch.cat([r.group for r in pieces]).unique().tolist():
        masks = [r.sampled_mask & (r.group == group).unsqueeze(1) for r in pieces]
        flat = torch.cat([v[m] for v, m in zip(values, masks, strict=True)])
        whitened = maths.masked_whiten(flat, torch.ones_like(flat, dtype=torch.bool), shift_mean)
        parts = whitened.split([int(m.sum()) for m in masks])
        for result, mask, part in zip(results, masks, parts, strict=True):
            result[mask] = part
    return results


def row_metrics(rows: TokenBatch, options: PPOOptions) -> dict[str, float]:
    """What is logged of rows whose returns are known: entropy, scores, KL, and how much of the returns the critic explains."""
    kl = token_kl(rows, options.kl_estimator)
    penalty = -(options.kl_coef if options.kl_in == "reward" else 0.0) * kl.sum(1).mean()
    known = rows.value_mask
    metrics = {
        "objective/entropy": float((-rows.old_logprobs).sum(1).mean()),
        "objective/scores": float(rows.score.mean()),
        "objective/rlhf_reward": float(penalty + rows.score.mean()),
        "val/explained_variance": _explained_variance(rows.values[known], rows.returns[known]),
    }
    if options.kl_coef == 0:  # there is no reference to be far from
        return metrics
    for kind in ("k1", "k3"):
        metrics[f"objective/kl_{kind}"] = float(token_kl(rows, kind).sum(1).mean())
    return metrics | {"objective/kl": float(kl.sum(1).mean()), "objective/non_score_reward": float(penalty)}


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 is a perfect critic, 0 one no better than the mean."""
    spread = float(returns.float().var(unbiased=False))
    return 1.0 - float((returns - values).float().var(unbiased=False)) / spread if spread > 0 else 0.0
