"""Update several adapters of one base model in one forward and backward pass.

Each learner alone has a small batch. Together they have a larger one, which a GPU reads in about the same time. Every
adapter gets the gradient of its own rows only, as if it were updated alone
(``tests/trl_ext/learning/test_update_layouts.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_ext.learning.learner import Learner, MicroBatch, PolicyOutput
from trl_ext.learning.metrics import Metrics
from trl_ext.models.forward import base_of, length_regimes, read_actions, tree_limits
from trl_ext.models.mixed_adapters import mixed, mixes
from trl_ext.ppo.batch import TokenBatch, concatenated
from trl_ext.ppo.losses import Totals, micro_batch_loss
from trl_ext.sharding.master_weights import move_gradients


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
    if learner.strategy.sharded or length_regimes(base_of(learner.model)):
        return False
    return mixes(learner.model, learner.adapter)


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
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    microbatches: dict[str, list[MicroBatch]] = {name: [] for name in names}
    everything = torch.arange(len(joint))
    most_rows = args.per_device_train_batch_size * len(names)
    limits = tree_limits(base_of(learners[names[0]].model))
    for name in names:
        learners[name].let_learn()  # PEFT gives gradients to the active adapter only
    for part in joint.microbatches(everything, most_rows, learners[names[0]].most_tokens, limits):
        loss = torch.zeros((), device=device)
        for number, microbatch, out in _outputs(learners, names, joint.take(part), owner[part.numpy()]):
            learner, total = learners[names[number]], totals[names[number]]
            term, measures = micro_batch_loss(microbatch, out, total, learner.args, learner.objective)
            loss = loss + term
            microbatches[names[number]].append((microbatch, out.logprobs.detach(), measures))
        loss.backward()
        for name in names:
            move_gradients(learners[name].strategy.masters)
    return {name: learners[name].summed(microbatches[name]) for name in names}


def _outputs(
    learners: Mapping[str, Learner], names: Sequence[str], rows: TokenBatch, owner: np.ndarray
) -> Iterator[tuple[int, TokenBatch, PolicyOutput]]:
    """Run one forward over ``rows`` of the learners ``owner`` [N]; yield each one's number, rows and output."""
    first = learners[names[0]]
    read = rows.to_read(tree_limits(base_of(first.model)))
    adapters = [str(learners[names[number]].adapter) for number in owner[read.rows]]
    entropies = first.args.entropy_coef != 0
    with mixed(first.model, adapters) as choose:
        choose(adapters)
        hidden, logprobs, entropy = read_actions(
            first.model,
            read,
            rows.input_ids[rows.sampled],
            rows.temperatures(first.args.temperature),
            first.autocast,
            first.args.logits_chunk,
            entropies,
            entropies,
        )
    # the owner of each token is known on the host, so that reading by it waits for nothing
    token_owner = torch.from_numpy(owner)[rows.sampled_on_host[0]]
    for number in np.unique(owner).tolist():
        tokens = (token_owner == number).nonzero().flatten().to(hidden.device)
        microbatch = rows.take(torch.from_numpy(np.flatnonzero(owner == number)))
        values = learners[names[number]].values_of(microbatch, hidden[tokens])
        yield number, microbatch, PolicyOutput(logprobs[tokens], values, None if entropy is None else entropy[tokens])
