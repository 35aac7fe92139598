"""Several adapters of one base in one forward and backward: a batch for the update where each learner alone has a small one.

Every adapter gets the gradient of its own rows alone, as if it had been updated by itself (``tests/test_update_layouts.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trl_ext.forward import base_of, read_actions
from trl_ext.learner import Learner, PolicyOutput
from trl_ext.lora_merge import plain_lora
from trl_ext.losses import Totals, micro_batch_loss
from trl_ext.metrics import Metrics
from trl_ext.token_batch import TokenBatch, concatenated


def groups_of(learners: Mapping[str, Learner], names: Sequence[str]) -> list[list[str]]:
    """``names`` in groups of those that can be updated together; whoever cannot is alone."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(id(base_of(learners[name].model)) if _joins(learners[name]) else name, []).append(name)
    return list(groups.values())


def _joins(learner: Learner) -> bool:
    """Whether PEFT can run this learner beside others in one batch, gradients included."""
    if learner.adapter is None or learner.critic not in ("head", "none") or learner.args.gradient_checkpointing:
        return False
    return plain_lora(learner.model, learner.adapter) and not learner.strategy.sharded


def accumulate_together(
    learners: Mapping[str, Learner], rows: Mapping[str, TokenBatch], index: Mapping[str, Tensor]
) -> dict[str, Metrics]:
    """:meth:`Learner.accumulate` of several learners on one base, which ``index`` names with their minibatches."""
    names = list(index)
    some = learners[names[0]]
    totals = {name: Totals.of(rows[name], index[name], learners[name].args) for name in names}
    parts = [rows[name].take(index[name]) for name in names]
    everybody = concatenated(parts)
    device = everybody.input_ids.device
    owner = torch.cat([torch.full((len(part),), number, device=device) for number, part in enumerate(parts)])
    sums: dict[str, Metrics] = {name: {} for name in names}
    everything = torch.arange(len(everybody), device=device)
    limits = (some.args.per_device_train_batch_size * len(names), some.args.max_tokens_per_microbatch)
    with _all_learning([learners[name] for name in names]):
        for part in everybody.microbatches(everything, *limits):
            loss = torch.zeros((), device=device)
            for number, piece, out in _outputs(learners, names, everybody.take(part), owner[part]):
                learner = learners[names[number]]
                own, measures = micro_batch_loss(piece, out, totals[names[number]], learner.args, learner.objective)
                if not bool(torch.isfinite(own)):
                    learner.report_not_finite(piece, out, own)
                loss = loss + own
                for key, value in measures.items():
                    sums[names[number]][key] = sums[names[number]].get(key, 0.0) + value
            loss.backward()
    return {name: learners[name].everybodys(sums[name]) for name in names}


def _outputs(
    learners: Mapping[str, Learner], names: Sequence[str], rows: TokenBatch, owner: Tensor
) -> Iterator[tuple[int, TokenBatch, PolicyOutput]]:
    """One forward over ``rows``; for each owner among them its number, its rows and what the forward says of them."""
    some = learners[names[0]]
    read, where, longest = rows.to_read()
    adapters = [str(learners[names[int(owner[row])]].adapter) for row in longest.tolist()]
    entropies = some.args.entropy_coef != 0
    hidden, logprobs, entropy = read_actions(
        some.model,
        read,
        where,
        rows.input_ids[rows.sampled_mask],
        some.args.temperature,
        some.autocast,
        some.args.logits_chunk,
        entropies,
        entropies,
        adapter_names=adapters,
    )
    speaker = owner.repeat_interleave(rows.sampled_mask.sum(1))
    for number in owner.unique().tolist():
        mine = speaker == number
        piece = rows.take((owner == number).nonzero().flatten())
        values = learners[names[number]].values_of(piece, hidden[mine])
        yield number, piece, PolicyOutput(logprobs[mine], values, None if entropy is None else entropy[mine])


@contextmanager
def _all_learning(learners: Sequence[Learner]) -> Iterator[None]:
    """PEFT lets the active adapter alone learn, and mixes adapters in evaluation mode only."""
    model = learners[0].model
    training = model.training
    model.eval()
    for learner in learners:
        learner.let_learn()
    try:
        yield
    finally:
        model.train(training)
