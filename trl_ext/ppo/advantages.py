"""Compute PPO's token advantages from scores, log-probabilities and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_ext.ppo import maths
from trl_ext.ppo.batch import TokenBatch
from trl_ext.ppo.options import PPOOptions


def assign_advantages(rows: TokenBatch, options: PPOOptions, has_critic: bool = True) -> dict[str, float]:
    """Fill in ``advantages`` and ``returns`` of ``rows``, and return statistics.

    ``rows`` have old log-probabilities and values. Token rewards are the KL penalty plus what each token earned, which
    for a completion with one score is that score at its last sampled token. GAE runs over each row's sampled tokens.
    Advantages are whitened within each ``rows.group``. Without a critic, lambda is 1 and values are 0, so the advantage
    is the whitened return.
    """
    token_gae(rows, options, has_critic)
    metrics = row_metrics(rows, options, has_critic)
    whiten_groups([rows])
    return metrics


def token_gae(rows: TokenBatch, options: PPOOptions, has_critic: bool) -> None:
    """Fill in ``advantages`` (not whitened) and ``returns`` by GAE within each row. Without a critic, lambda is 1."""
    rewards = token_rewards(rows, options)
    if options.whiten_rewards:
        rewards = _whitened([rewards], [rows], shift_mean=False)[0]
    values = rows.values.to(rewards.dtype)
    rows.advantages, rows.returns = gae_of(rewards, values, rows.sampled_mask, options, has_critic)


def gae_of(
    rewards: Tensor, values: Tensor, mask: Tensor, options: PPOOptions, has_critic: bool = True
) -> tuple[Tensor, Tensor]:
    """Return GAE's advantages and the critic's targets [N, T], each with the lambda that ``options`` say.

    Without a critic, lambda is 1. With ``lam_alpha`` the lambda of a row with l tokens in ``mask`` is
    ``1 - 1 / (lam_alpha * l)``, and at least 0 (VAPO, arXiv 2504.05118): so the sum of the weights of its temporal
    differences, ``1 / (1 - lambda)``, grows with the length. ``lam_critic`` is the lambda of the targets, because a
    critic that is trained on its own values learns slowly in long answers (decoupled GAE, arXiv 2503.01491).
    """
    lam: float | Tensor = options.lam if has_critic else 1.0
    if has_critic and options.lam_alpha is not None:
        lengths = mask.sum(1).clamp(min=1).to(rewards.dtype)
        lam = (1 - 1 / (options.lam_alpha * lengths)).clamp(min=0)
    advantages, returns = maths.gae(rewards, values, mask, options.gamma, lam)
    if has_critic and options.lam_critic is not None:
        _, returns = maths.gae(rewards, values, mask, options.gamma, options.lam_critic)
    return advantages, returns


def token_rewards(rows: TokenBatch, options: PPOOptions) -> Tensor:
    """Return token rewards [N, T]: what each sampled token earned, minus the KL penalty if ``kl_in`` is reward."""
    kl_coef = options.kl_coef if options.kl_in == "reward" else 0.0
    return rows.token_scores - kl_coef * token_kl(rows, options.kl_estimator)


def token_kl(rows: TokenBatch, estimator: str) -> Tensor:
    """Return the estimated KL divergence from the reference at every sampled token [N, T], and 0 elsewhere."""
    return torch.where(rows.sampled_mask, maths.kl_estimate(rows.old_logprobs, rows.ref_logprobs, estimator), 0.0)


def whiten_groups(batches: Sequence[TokenBatch], unbiased: bool = True) -> None:
    """Whiten ``advantages`` within each ``group``, over the sampled tokens of all ``batches``.

    The batches may belong to several policies. The standard deviation is ``unbiased``, or that of the population.
    """
    values = [rows.advantages for rows in batches]
    for rows, whitened in zip(batches, _whitened(values, batches, unbiased=unbiased), strict=True):
        rows.advantages = whitened


def _whitened(
    values: Sequence[Tensor], batches: Sequence[TokenBatch], shift_mean: bool = True, unbiased: bool = True
) -> list[Tensor]:
    results = [torch.zeros_like(v) for v in values]
    for group in torch.cat([r.group for r in batches]).unique().tolist():
        masks = [r.sampled_mask & (r.group == group).unsqueeze(1) for r in batches]
        flat = torch.cat([v[m] for v, m in zip(values, masks, strict=True)])
        whitened = maths.masked_whiten(flat, torch.ones_like(flat, dtype=torch.bool), shift_mean, unbiased)
        parts = whitened.split([int(m.sum()) for m in masks])
        for result, mask, part in zip(results, masks, parts, strict=True):
            result[mask] = part
    return results


def row_metrics(rows: TokenBatch, options: PPOOptions, has_critic: bool, alone: bool = True) -> dict[str, float]:
    """Return the logged statistics of rows with returns: entropy, scores, KL, and the critic's explained variance.

    The explained variance is left out without a critic, and where the returns are constant. It is also left out where
    rows whose returns come from themselves ``alone`` all earn the same, because the returns of these differ only by the
    critic's own values.
    """
    kl = token_kl(rows, options.kl_estimator)
    penalty = -(options.kl_coef if options.kl_in == "reward" else 0.0) * kl.sum(1).mean()
    mask = rows.value_mask
    values, returns = rows.values[mask], rows.returns[mask]
    earned = token_rewards(rows, options).flip(1).cumsum(1).flip(1)[mask] if alone and options.gamma == 1 else returns
    stats = {
        "objective/entropy": (-rows.old_logprobs).sum(1).mean(),
        "objective/scores": rows.score.mean(),
        "objective/rlhf_reward": penalty + rows.score.mean(),
        "returns": returns.float().var(unbiased=False),
        "errors": (returns - values).float().var(unbiased=False),
        "earned": earned.float().var(unbiased=False),
        "square": returns.float().square().mean(),
    }
    if options.kl_coef != 0:  # without a reference the KL is unknown
        stats |= {f"objective/kl_{kind}": token_kl(rows, kind).sum(1).mean() for kind in ("k1", "k3")}
        stats |= {"objective/kl": kl.sum(1).mean(), "objective/non_score_reward": penalty}
    # one wait for the device; float64 holds each of them exactly
    metrics = dict(zip(stats, torch.stack([value.double() for value in stats.values()]).tolist(), strict=True))
    spread, errors, told, square = [metrics.pop(name) for name in ("returns", "errors", "earned", "square")]
    something = has_critic and min(spread, told) > 1e-10 * square  # a smaller variance is rounding
    # 1 for a perfect critic, and 0 for one that predicts the mean return
    return metrics | ({"val/explained_variance": 1.0 - errors / spread} if something else {})
