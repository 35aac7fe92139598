"""The losses of training: policy objectives for each token, and the loss of one micro-batch.

An objective is a function ``(new, old, advantages, mask, options) -> (losses, measures)``. It receives new and old
log-probabilities and advantages [N, T] with a boolean mask. It returns the loss of every token [N, T] and named values
[N, T], of which the trainer logs the token mean. ``OBJECTIVES`` names them all. ``options.aggregation`` decides how the
losses are averaged (:func:`token_weights`), so no objective repeats that. The loss of a micro-batch adds the critic's
loss, the KL term and the entropy term; each is averaged over the whole minibatch. :func:`checked_objective` is the one
place that calls an objective.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_ext.copies import is_users
from trl_ext.errors import ArgumentError, one_line
from trl_ext.ppo import maths
from trl_ext.ppo.batch import TokenBatch
from trl_ext.ppo.options import PPOOptions
from trl_ext.ppo.value_bins import ValueBins
from trl_ext.process import distributed

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, PPOOptions], tuple[Tensor, dict[str, Tensor]]]


def importance_ratio(new: Tensor, old: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Return ``pi_new / pi_old`` [N, T], for each token or as one number for all tokens of an answer.

    ``token`` is the ratio of each token. ``sequence`` is the product over the answer's tokens (MARFT, arXiv
    2504.16129). ``sequence_mean`` is its length-normalised form ``exp(mean log-ratio)`` (GSPO, arXiv 2507.18071).
    ``trajectory`` is the product over all answers of a trajectory (M-GRPO, arXiv 2511.13288, eq. 14). Each row is then
    a whole trajectory, because the loss joins its answers before it calls the objective.

    A ratio is at most ``exp(20)``, and has no gradient beyond (:func:`trl_ext.ppo.maths.bounded_exp`).
    """
    # mask before exp, because log-probabilities outside the mask may have any value
    difference = torch.where(mask, new - old, torch.zeros_like(new))
    if kind == "token":
        return maths.bounded_exp(difference)
    total = difference.sum(1, keepdim=True)
    if kind == "sequence_mean":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return maths.bounded_exp(total).expand_as(new)


def ppo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7): ``max(-A r, -A clamp(r, 1 - low, 1 + high))``.

    With ``dual_clip`` c (Ye et al. 2020) the loss is at most ``-c A`` where A < 0. Otherwise a huge ratio would make
    the loss huge.
    """
    ratio = importance_ratio(new, old, mask, options.ratio)
    high = options.cliprange if options.cliprange_high is None else options.cliprange_high
    losses, clipped = maths.policy_loss_terms(ratio, advantages, options.cliprange, high, options.dual_clip)
    return losses, {"clipfrac": clipped, "ratio": ratio.detach()}


def reinforce(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions):
    """REINFORCE: ``-A log pi`` (Williams 1992).

    With ``tis_cap`` c each term has the weight ``min(r, c)``, which is held constant (truncated importance sampling).
    This allows several steps on one batch. Without it, take one step.
    """
    ratio = importance_ratio(new, old, mask, options.ratio).detach()
    weight = torch.ones_like(ratio) if options.tis_cap is None else ratio.clamp(max=options.tis_cap)
    losses = -advantages * weight * torch.where(mask, new, torch.zeros_like(new))
    return losses, {"clipfrac": (ratio > weight).to(losses.dtype) if options.tis_cap else weight * 0, "ratio": ratio}


def dis(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions):
    """Double-sided importance sampling (SAO, Hou et al. 2026, arXiv 2607.07508, eq. 3): ``-A w log pi``.

    The weight w is the ratio r, held constant, where ``1 - cliprange <= r <= 1 + cliprange_high``, and 0 outside, on
    either side and whatever the sign of the advantage. The method takes it to the policy that sampled (``ratio_to:
    sampler``), so that no policy before the update is needed.
    """
    ratio = importance_ratio(new, old, mask, options.ratio).detach()
    high = options.cliprange if options.cliprange_high is None else options.cliprange_high
    inside = ((ratio >= 1.0 - options.cliprange) & (ratio <= 1.0 + high)).to(new.dtype)
    losses = -advantages * inside * ratio * torch.where(mask, new, torch.zeros_like(new))
    return losses, {"clipfrac": 1.0 - inside, "ratio": ratio}


OBJECTIVES: dict[str, Any] = {"ppo": ppo, "reinforce": reinforce, "dis": dis}


def checked_objective(
    objective: Objective, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PPOOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call an objective, and return its losses [N, T] and measures [N, T], of which ``ratio`` is added where it lacks.

    No number is read, because that would wait for the device. An objective of the user's gets tensors of its own.

    Raises:
        ArgumentError: it returned something else, or losses without a gradient.
    """
    if is_users(objective, "trl_ext"):
        new, old, advantages, mask = (tensor.clone() for tensor in (new, old, advantages, mask))
    returned = objective(new, old, advantages, mask, options)
    losses, measures = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(measures, Mapping):
        got = f"{_kind(returned)} and no measures"
    elif strangers := [n for n, v in measures.items() if not isinstance(v, Tensor) or v.shape != new.shape]:
        got = f"the measure {strangers[0]!r}, which is {_kind(measures[strangers[0]])}"
    elif not isinstance(losses, Tensor) or losses.shape != new.shape:
        got = f"losses that are {_kind(losses)}"
    elif new.requires_grad and not losses.requires_grad:
        got = "losses without a gradient, so that nothing would be learned"
    else:
        added = {} if "ratio" in measures else {"ratio": importance_ratio(new.detach(), old, mask, options.ratio)}
        return losses, {**measures, **added}
    raise ArgumentError(
        f"objective {options.objective}: returned {got}; expected (losses, measures): the loss of each token, "
        f"{_kind(new)} with the gradient of 'new', and a dict of tensors of this shape, which may be empty"
    )


def objective_of(options: PPOOptions) -> Objective:
    """Return the objective that ``options`` name, which was tried on a few made-up tokens.

    Raises:
        ArgumentError: no objective has this name, or it fails, or returns something else than losses [N, T] that are
            finite and have a finite gradient, and measures.
    """
    if options.objective not in OBJECTIVES:
        raise ArgumentError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {options.objective!r}")
    # answers of 8 and of 5 tokens, better and worse than expected, whose probabilities have moved or not
    mask = torch.arange(8) < torch.tensor([[8], [5], [8], [5]])
    old, signs = -torch.linspace(0.1, 2.0, 32).view(4, 8) * mask, torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]) * mask
    new = (old + torch.tensor([[0.0], [0.0], [0.1], [-0.1]]) * mask).requires_grad_(True)
    try:
        with torch.enable_grad():
            losses, _ = checked_objective(OBJECTIVES[options.objective], new, old, signs, mask, options)
            (gradient,) = torch.autograd.grad(losses.sum(), new, allow_unused=True, materialize_grads=True)
    except ArgumentError:
        raise
    except Exception as error:
        what = f"failed on made-up tokens: {type(error).__name__}: {one_line(error)}"
        raise ArgumentError(f"objective {options.objective}: {what}") from error
    loss, size = float(losses.detach().sum()), float(gradient.abs().sum())
    if not (math.isfinite(loss) and 0 < size < math.inf):
        raise ArgumentError(
            f"objective {options.objective}: on made-up tokens and zeros outside of the mask its losses sum to {loss} "
            f"and the sizes of their gradients to {size}; expected finite numbers, and the second above 0"
        )
    return OBJECTIVES[options.objective]


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a value of type {type(value).__name__}"


def token_weights(mask: Tensor, rows: Tensor, total: float | Tensor, aggregation: str) -> Tensor:
    """Return the weight of each token's loss [N, T] in the sum over tokens. ``rows`` [N] are the weights of whole
    answers.

    ``total`` is :func:`aggregation_total` of the minibatch, so that the sum over its micro-batches is its mean.
    """
    weights = rows.unsqueeze(1) * mask
    if aggregation in ("sequence_mean", "per_main_rollout"):
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    return weights / total


def aggregation_total(mask: Tensor, rows: Tensor, aggregation: str) -> Tensor:
    """Return the weighted number of tokens for a token mean, and the weighted number of answers otherwise, as [].

    It stays on its device, because reading it would wait there.
    """
    return (rows * mask.sum(1)).sum() if aggregation == "token_mean" else rows.sum()


def joined(rows: TokenBatch, values: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Join the sampled tokens of each trajectory of ``rows`` to one row, in the order of its rows.

    Args:
        rows: N rows with S trajectories, of which the longest has L sampled tokens.
        values: tensors [N, T].

    Returns:
        Each of ``values`` as [S, L], a mask [S, L] of the tokens, and for each of the M sampled tokens of ``rows``, in
        row-major order, its flattened position in [S, L].
    """
    sampled = torch.tensor(rows.tree.lengths) - torch.tensor(rows.first)
    _, number = rows.trajectory.repeat_interleave(sampled).unique(return_inverse=True)
    order = torch.argsort(number, stable=True)
    lengths = torch.bincount(number)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    position = torch.empty_like(order)
    position[order] = mask.flatten().nonzero().flatten()
    # all that was decided on the host
    mask, position = (tensor.to(rows.input_ids.device) for tensor in (mask, position))
    whole = [_spread(value[rows.sampled], mask.shape, position) for value in values]
    return whole, mask, position


@dataclass(frozen=True)
class Totals:
    """The numbers by which sums over a minibatch are divided. They let a minibatch be split into any micro-batches."""

    policy: float | Tensor
    tokens: float
    values: float

    @classmethod
    def of(cls, rows: TokenBatch, index: Tensor, options: PPOOptions) -> "Totals":
        """Return the totals of the minibatch ``index`` of ``rows``, summed over all processes."""
        mask = rows.chosen[index]
        policy: float | Tensor = aggregation_total(mask, rows.weight[index], options.aggregation)
        tokens: float = sum([rows.tree.lengths[row] - rows.first[row] for row in index.tolist()])
        values: float = int(rows.value_mask[index.cpu()].sum())
        if distributed.size() > 1:
            policy, tokens, values = distributed.all_reduce_sum([float(policy), tokens, values], mask.device)
        if options.aggregation == "per_main_rollout" and rows.rollouts is not None:
            # a constant, so that a row counts the same in whichever minibatch it is, whatever other rows are there
            policy = rows.rollouts / options.num_mini_batches
        return cls(policy + (policy == 0), tokens, values)  # a grammar may have forced all tokens


def micro_batch_loss(
    rows: TokenBatch, out: Any, totals: Totals, options: PPOOptions, objective: Objective
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of ``rows`` in the minibatch's loss and in its measures. Both add up over micro-batches.

    The measures are numbers of no dimension on the device, because reading them would wait for it.

    ``out`` is the learner's output at the sampled tokens of ``rows``: log-probabilities, values or None, entropies or
    None, and the logits of values that are distributions.
    """
    mask, sampled = rows.chosen, rows.sampled
    new = _spread(out.logprobs, mask.shape, *sampled)
    old = (rows.old_logprobs if options.ratio_to == "update" else sampling_logprobs(rows)).to(new.dtype)
    if options.ratio == "trajectory":
        (whole_new, whole_old, advantages), whole_mask, position = joined(rows, [new, old, rows.advantages])
        losses, measures = checked_objective(objective, whole_new, whole_old, advantages, whole_mask, options)
        losses = _spread(losses.flatten()[position], mask.shape, *sampled)
        measures = {name: _spread(value.flatten()[position], mask.shape, *sampled) for name, value in measures.items()}
    else:
        losses, measures = checked_objective(objective, new, old, rows.advantages, mask, options)
    weights = token_weights(mask, rows.weight, totals.policy, options.aggregation)
    if options.engine_tis_cap is not None:
        weights = weights * engine_weights(rows, options.engine_tis_cap, options.engine_tis_mode)
    policy_loss = (losses * weights).sum()
    loss = torch.zeros_like(policy_loss) if rows.critic_only else policy_loss
    sums = {"policy_loss": policy_loss.detach()}
    if options.kl_in == "loss" and options.kl_coef != 0:
        difference = torch.where(mask, new - rows.ref_logprobs, 0.0)
        kl_loss = (maths.kl_estimate(difference, torch.zeros_like(difference), options.kl_estimator) * weights).sum()
        loss = loss if rows.critic_only else loss + options.kl_coef * kl_loss
        sums["kl_loss"] = kl_loss.detach()
    if options.entropy_coef != 0:
        entropy = (_spread(out.entropies, mask.shape, *sampled) * weights).sum()
        loss = loss if rows.critic_only else loss - options.entropy_coef * entropy
    value_loss = value_clipped = valued = policy_loss.new_zeros(())
    if out.values is not None:
        # the mask is on the host, so reading by it waits for nothing
        trained = rows.value_mask[rows.sampled_on_host]
        returns = rows.returns[sampled][trained]
        if (bins := ValueBins.of(options)) is not None:
            terms = bins.losses(out.value_logits[trained], returns)
            clips = torch.zeros_like(terms)
        else:
            terms, clips = maths.value_loss_terms(
                out.values[trained],
                rows.values[sampled][trained],
                returns,
                options.cliprange_value,
                options.huber_delta if options.value_loss == "huber" else None,
            )
        value_loss, value_clipped = terms.sum() / totals.values, clips.sum() / totals.values
        valued = valued + len(terms)
        loss = loss + options.vf_coef * value_loss
    with torch.no_grad():
        difference = out.logprobs - rows.old_logprobs[sampled]
        sums |= {
            "loss": loss,
            "value_loss": value_loss,
            "value_clipped": value_clipped,
            "approx_kl": 0.5 * (difference**2).sum() / totals.tokens,
            "valued": valued,
            "advantaged": ((rows.advantages * rows.weight.unsqueeze(1))[sampled] != 0).sum().to(policy_loss.dtype),
            "learned": _moved_by(policy_loss, out.logprobs, rows.critic_only),
        }
        known = {"clipfrac": "clipped", "ratio": "ratio"}
        sums |= {
            known.get(name, f"measure/{name}"): values[sampled].sum() / totals.tokens
            for name, values in measures.items()
        }
    return loss, {name: value.detach() for name, value in sums.items()}


def _moved_by(policy_loss: Tensor, logprobs: Tensor, critic_only: bool) -> Tensor:
    """Return how many of the ``logprobs`` the policy's loss moves, after all masks, weights and clips, as a tensor [].

    Neither the KL nor the entropy counts, and nothing moves where the critic learns alone.
    """
    if critic_only or not logprobs.requires_grad:
        return policy_loss.new_zeros(())
    # it goes from the loss back to the log-probabilities and not through the model
    (gradient,) = torch.autograd.grad(policy_loss, logprobs, retain_graph=True, allow_unused=True)
    return policy_loss.new_zeros(()) if gradient is None else gradient.count_nonzero().to(policy_loss.dtype)


def sampling_logprobs(rows: TokenBatch) -> Tensor:
    """Return the log-probabilities [N, T] under the policy that sampled: the engine's, or where it told none, those
    before the update."""
    return torch.where(rows.sampler_logprobs.isnan(), rows.old_logprobs, rows.sampler_logprobs)


def engine_weights(rows: TokenBatch, cap: float, mode: str = "token_truncate") -> Tensor:
    """Return importance weights [N, T] for tokens that other weights, or another program, have sampled.

    A weight is the trainer's probability of a token before the update, divided by the probability of the engine that
    sampled it (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). It is 1
    where the engine's probability is unknown.

    Args:
        rows: the completions.
        cap: the largest weight.
        mode: ``token_truncate``: larger weights are ``cap``. ``token_mask``: the weight of a token outside of [1/cap,
            cap] is 0. ``sequence_mask``: those of a completion are 0 if their product is outside (the modes of TRL's
            ``GRPOConfig``, which have no lower bound there).
    """
    recorded = rows.sampled_mask & ~rows.sampler_logprobs.isnan()
    logs = torch.where(recorded, rows.old_logprobs - rows.sampler_logprobs, 0.0)
    if mode == "token_truncate":
        return torch.where(recorded, torch.exp(logs).clamp(max=cap), 1.0)
    judged = logs if mode == "token_mask" else logs.sum(1, keepdim=True)
    return torch.where(judged.abs() <= math.log(cap), torch.exp(logs), 0.0)


def engine_gap(rows: TokenBatch) -> list[float]:
    """Return sums over the tokens whose engine gave log-probabilities: |trainer - engine|, engine - trainer, and 1."""
    recorded = rows.sampled_mask & ~rows.sampler_logprobs.isnan()
    difference = (rows.sampler_logprobs - rows.old_logprobs)[recorded]
    # one wait for the device; float64 holds the number of tokens
    return torch.stack([difference.abs().sum().double(), difference.sum().double(), recorded.sum().double()]).tolist()


def _spread(flat: Tensor, shape: Sequence[int], *index: Tensor) -> Tensor:
    """Return the values [M] at the places ``index`` of a tensor of ``shape``, with 0 elsewhere, with their gradient."""
    # one index counts through the flattened tensor
    full = flat.new_zeros(shape)
    return (full.view(-1) if len(index) == 1 else full).index_put(index, flat).view(shape)
