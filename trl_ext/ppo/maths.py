"""The mathematics of PPO: pure functions of tensors, no models, no state.

Shapes: ``N`` is the number of rows (one utterance each), and ``T`` is the number of tokens. A mask is boolean (or 0/1).
It is true at the tokens that the policy sampled and is trained on. These functions never read a value outside the mask.
They compute statistics in the precision of their inputs, so pass float32 or float64.

Given the same tensors, these functions return the same as ``trl.experimental.ppo`` of TRL 1.12, which followed Huang et
al., "The N Implementation Details of RLHF with PPO", 2023.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_ext.process.devices import total_bytes

MOST_EXPONENT = 20.0
"""The largest logarithm of a ratio of probabilities, in nats."""
CPU_SLICE, ACCELERATOR_SLICE = 2**22, 2**29
"""Most bytes of float32 logits that are worked on at a time, on a CPU and on an accelerator with enough memory."""


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of ``values`` where ``mask`` is true, over everything or along ``dim``.

    The mean of an empty selection is NaN.
    """
    mask = mask.to(values.dtype)
    # where() and not a product, because NaN or inf outside the mask would spread through a product
    selected = torch.where(mask > 0, values, torch.zeros_like(values))
    if dim is None:
        return selected.sum() / mask.sum()
    return selected.sum(dim) / mask.sum(dim)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of ``values`` where ``mask`` is true. By default it is unbiased (n - 1).

    Raises:
        ValueError: the mask selects no value.
    """
    count = mask.sum()
    if count == 0:
        raise ValueError("masked_var: the mask selects no value; got a mask of zeros, expected at least one true entry")
    centred = values - masked_mean(values, mask)
    variance = masked_mean(centred**2, mask)
    if unbiased and count > 1:
        variance = variance * count / (count - 1)
    return variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, unbiased: bool = True) -> Tensor:
    """Return ``(values - mean) / sqrt(var + 1e-8)`` under ``mask``, and 0 outside of it. By default the variance is
    unbiased.

    ``shift_mean=False`` keeps the mean, which is used for rewards. A single value has no spread, so it becomes 0.

    Raises:
        ValueError: the mask selects no value.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask, unbiased) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, torch.zeros_like(whitened))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trainable tokens of each row (Schulman et al. 2016, eq. 11-16).

    ``delta_t = r_t + gamma * V_{t'} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t'}``. Here ``t'`` is the *next
    trainable token of the row*, not the next column: the recursion skips tokens outside ``mask`` (prompts, other
    speakers, padding). After the last trainable token both V and A are 0.

    Args:
        rewards: [N, T].
        values: [N, T], the critic's values.
        mask: [N, T], true at trainable tokens.
        gamma: the discount per token.
        lam: the lambda of GAE, one number or one for each row [N].

    Returns:
        ``(advantages, returns)`` of shape [N, T]; ``returns = advantages + values`` under the mask and 0 outside it.

    Raises:
        ValueError: the three tensors do not have one shape [N, T].
    """
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        raise ValueError(f"gae: expected one shape [row, token], got {rewards.shape}, {values.shape} and {mask.shape}")
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])
    next_advantage = values.new_zeros(values.shape[0])
    columns = mask.any(0).nonzero().flatten().tolist()
    for t in reversed(columns):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, torch.zeros_like(advantage))
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def policy_loss_terms(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate of each token (Schulman et al. 2017, eq. 7): (losses, clipped as 0/1).

    A loss is ``max(-A r, -A clamp(r, 1 - low, 1 + high))``. With ``dual_clip`` c (Ye et al. 2020, arXiv 1912.09729) it
    is at most ``-c A`` where A < 0.
    """
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - low, 1.0 + high)
    losses = torch.max(plain, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * dual_clip), losses)
    return losses, (clipped > plain).to(losses.dtype)


def value_loss_terms(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float, huber_delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return half the critic's clipped squared error of each token: (losses, clipped as 0/1).

    A loss is ``0.5 * max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)``. With ``huber_delta`` the half
    square becomes linear beyond that distance.
    """
    clipped_values = torch.clamp(values, old_values - clip, old_values + clip)
    if huber_delta is None:
        plain, clipped = 0.5 * (values - returns) ** 2, 0.5 * (clipped_values - returns) ** 2
    else:
        plain, clipped = (
            torch.nn.functional.huber_loss(v, returns, reduction="none", delta=huber_delta)
            for v in (values, clipped_values)
        )
    return torch.max(plain, clipped), (clipped > plain).to(values.dtype)


def bounded_exp(exponent: Tensor) -> Tensor:
    """Return ``exp(min(exponent, 20))``, which has no gradient beyond :data:`MOST_EXPONENT`.

    Ratios of probabilities of long answers leave the range of float32 at 88 nats, and infinity times a clipped gradient
    of 0 is not a number. A ratio of 5e8 is clipped by every rule, and a step along a larger one would end the run.
    """
    return torch.exp(exponent.clamp(max=MOST_EXPONENT))


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """Return an estimate of KL(policy || reference) for each token that the policy sampled.

    With ``d = log p - log p_ref``, the estimators are ``k1 = d`` (unbiased), ``k2 = d^2 / 2`` (biased, low variance)
    and ``k3 = exp(-d) - 1 + d`` (unbiased, never negative, with :func:`bounded_exp`). Source: Schulman, "Approximating
    KL divergence", 2020.

    Raises:
        ValueError: ``kind`` is not one of these names.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        return bounded_exp(-difference) - 1.0 + difference
    raise ValueError(f"kl_estimate: kind must be 'k1', 'k2' or 'k3', got {kind!r}")


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: float | Tensor = 1.0, allowed: Tensor | None = None
) -> Tensor:
    """Return the log-probability of each token under ``softmax(logits / temperature)``, in at least float32.

    ``logits`` are [..., V], and ``token_ids`` are [...]. ``temperature`` is a number, or [...] with one for each token.
    The library computes every log-probability with this function: old, new and reference log-probabilities, all at the
    sampling temperature.

    ``allowed`` [M, ceil(V / 32)] int32 has a bit for each of the V tokens. The softmax of each of the M positions, in
    their order, is then that over the tokens whose bit is 1.
    """
    flat = _TokenLogprobs.apply(logits.flatten(0, -2), token_ids.flatten(), _flat(temperature), allowed)
    return flat.view(token_ids.shape)


def _flat(temperature: float | Tensor) -> float | Tensor:
    return temperature.flatten() if isinstance(temperature, Tensor) else temperature


def _scaled(
    logits: Tensor, dtype: torch.dtype, temperature: float | Tensor, part: slice, allowed: Tensor | None
) -> Tensor:
    """Return the logits of a part of the rows, divided by their temperatures, in memory of its own.

    Those of tokens that are not ``allowed`` are -inf.
    """
    scaled = logits[part].to(dtype, copy=True)
    if isinstance(temperature, Tensor):
        scaled.div_(temperature[part].unsqueeze(-1))
    elif temperature != 1:
        scaled.div_(temperature)
    return scaled if allowed is None else only_allowed_(scaled, allowed[part])


def only_allowed_(logits: Tensor, allowed: Tensor) -> Tensor:
    """Set the ``logits`` [N, V] of tokens that are not ``allowed`` [N, ceil(V / 32)], by the bits of int32, to -inf.

    Tokens beyond the last bit are not allowed. Returns ``logits``.
    """
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    refused = ((allowed.contiguous().view(torch.uint8).unsqueeze(-1) >> places) & 1 == 0).flatten(1)
    size = logits.shape[1]
    logits[:, : refused.shape[1]].masked_fill_(refused[:, :size], -torch.inf)
    logits[:, refused.shape[1] :] = -torch.inf
    return logits


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens [M] under logits [M, V], some rows at a time, without a float32 copy of all."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float | Tensor, allowed: Tensor | None
    ) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(len(logits), dtype=exact, device=logits.device)
        normaliser = torch.empty_like(logprobs)
        for part in _parts(logits):
            scaled = _scaled(logits, exact, temperature, part, allowed)
            normaliser[part] = scaled.logsumexp(-1)
            logprobs[part] = scaled.gather(-1, token_ids[part].unsqueeze(-1)).squeeze(-1) - normaliser[part]
        ctx.save_for_backward(logits, token_ids, normaliser, allowed)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        logits, token_ids, normaliser, allowed = ctx.saved_tensors
        result = torch.empty_like(logits)
        scaled_gradient = (gradient / ctx.temperature).unsqueeze(-1)
        for part in _parts(logits):
            # d log p(token) / d logits = (1[token] - p) / temperature
            scaled = _scaled(logits, normaliser.dtype, ctx.temperature, part, allowed)
            rows = scaled.sub_(normaliser[part].unsqueeze(-1)).exp_()
            rows.mul_(-scaled_gradient[part])
            result[part] = rows.scatter_add_(-1, token_ids[part].unsqueeze(-1), scaled_gradient[part])
        return result, None, None, None


def _parts(logits: Tensor) -> Iterator[slice]:
    """Return slices of at most :func:`_rows_at_a_time`."""
    rows = _rows_at_a_time(logits)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _rows_at_a_time(logits: Tensor) -> int:
    """Return how many rows of ``logits`` [M, V] have a float32 copy of at most :func:`_slice_bytes`, and at least 1."""
    return max(1, _slice_bytes(logits.device.type) // (4 * logits.shape[-1]))


@cache
def _slice_bytes(kind: str) -> int:
    """Return how large a slice of logits should be on a device of this ``kind``. Results do not depend on it."""
    # On a CPU it stays in the cache. An accelerator waits for the host between small slices, so it gets a large one, of
    # which about three copies must fit into a small part of its memory.
    if kind == "cpu":
        return CPU_SLICE
    total = total_bytes()
    return ACCELERATOR_SLICE // 8 if total is None else min(ACCELERATOR_SLICE, total // 256)


def token_entropies(logits: Tensor, temperature: float | Tensor = 1.0, allowed: Tensor | None = None) -> Tensor:
    """Return the entropy in nats of ``softmax(logits / temperature)`` at each position.

    ``logits`` are [..., V]. ``temperature`` is a number, or [...] with one for each position. The computation is in
    float32. ``allowed`` is as in :func:`token_logprobs`.
    """
    rows, flat = logits.flatten(0, -2), _flat(temperature)
    parts = []
    for part in list(_parts(rows)) or [slice(0)]:  # to avoid a copy of all logits
        logprobs = torch.log_softmax(_scaled(rows, torch.float32, flat, part, allowed), dim=-1)
        # a token that a model rules out has probability 0 and adds 0, not 0 times infinity
        logprobs = logprobs.clamp(min=torch.finfo(torch.float32).min)
        parts.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.cat(parts).view(logits.shape[:-1])
