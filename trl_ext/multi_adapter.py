"""Update several adapters of one base model in one forward and backward pass.

Each learner alone has a small batch. Together they have a larger one, which a GPU reads in about the same time. Every
adapter gets the gradient of its own rows only, as if it were updated alone (``tests/test_update_layouts.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.forward import base_of, read_actions, tree_limits
from trl_ext.learner import Learner, PolicyOutput
from trl_ext.losses import Totals, micro_batch_loss
from trl_ext.master_weights import move_gradients
from trl_ext.metrics import Metrics
from trl_ext.mixed_adapters import mixed, mixes
from trl_ext.token_batch import TokenBatch, concatenated


def groups_of(learners: Mapping[str, Learner], names: Sequence[str]) -> list[list[str]]:
    """Split the learners ``names`` into groups that can be updated together. The others form groups of one."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(id(base_of(learners[name].model)) if _joins(learners[name]) else name, []).append(name)
    return list(groups.values())


def _joins(learner: Learner) -> bool:
    """Return whether this learner's adapter can be trained beside other adapters in one batch."""
    if learner.adapter is None or learner.critic not in ("head", "none") or learner.args.gradient_checkpointing:
        return False
    return mixes(learner.model, learner.adapter) and not learner.strategy.sharded


def accumulate_together(
    learners: Mapping[str, Learner], rows: Mapping[str, TokenBatch], index: Mapping[str, Tensor]
) -> dict[str, Metrics]:
    """Do :meth:`Learner.accumulate` for several learners of one base at once.

    Args:
        learners: the learners by name.
        rows: the token batches by learner.
        index: the minibatch of each learner that takes part.

    Returns:
        The statistics of each learner's minibatch.

    Raises:
        NonFiniteError: a loss is NaN or infinite.
    """
    names = list(index)
    args = learners[names[0]].args
    totals = {name: Totals.of(rows[name], index[name], learners[name].args) for name in names}
    parts = [rows[name].take(index[name]) for name in names]
    joint = concatenated(parts)
    device = joint.input_ids.device
    owner = torch.cat([torch.full((len(part),), number, device=device) for number, part in enumerate(parts)])
    sums: dict[str, Metrics] = {name: {} for name in names}
    everything = torch.arange(len(joint), device=device)
    most_rows = args.per_device_train_batch_size * len(names)
    limits = tree_limits(base_of(learners[names[0]].model))
    for name in names:
        learners[name].let_learn()  # PEFT gives gradients to the active adapter only
    for part in joint.microbatches(everything, most_rows, learners[names[0]].most_tokens, limits):
        loss = torch.zeros((), device=device)
        for number, microbatch, out in _outputs(learners, names, joint.take(part), owner[part]):
            learner, total = learners[names[number]], totals[names[number]]
            term, measures = micro_batch_loss(microbatch, out, total, learner.args, learner.objective)
            if not bool(torch.isfinite(term)):
                learner.report_not_finite(microbatch, out, term)
            loss = loss + term
            for key, value in measures.items():
                sums[names[number]][key] = sums[names[number]].get(key, 0.0) + value
        loss.backward()
        for name in names:
            move_gradients(learners[name].strategy.masters)
    return {name: learners[name].sum_over_processes(sums[name]) for name in names}


def _outputs(
    learners: Mapping[str, Learner], names: Sequence[str], rows: TokenBatch, owner: Tensor
) -> Iterator[tuple[int, TokenBatch, PolicyOutput]]:
    """Run one forward over ``rows``, whose learners ``owner`` [N] numbers.

    For each learner this yields its number, its rows, and the forward's output at their sampled tokens.
    """
    first = learners[names[0]]
    read = rows.to_read(tree_limits(base_of(first.model)))
    adapters = [str(learners[names[number]].adapter) for number in owner[read.rows].tolist()]
    entropies = first.args.entropy_coef != 0
    with mixed(first.model, adapters) as choose:
        choose(adapters)
        hidden, logprobs, entropy = read_actions(
            first.model,
            read,
            rows.input_ids[rows.sampled_mask],
            first.args.temperature,
            first.autocast,
            first.args.logits_chunk,
            entropies,
            entropies,
        )
    token_owner = owner.repeat_interleave(rows.sampled_mask.sum(1))
    for number in owner.unique().tolist():
        mask = token_owner == number
        microbatch = rows.take((owner == number).nonzero().flatten())
        values = learners[names[number]].values_of(microbatch, hidden[mask])
        yield number, microbatch, PolicyOutput(logprobs[mask], values, None if entropy is None else entropy[mask])
