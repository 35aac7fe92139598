"""What must hold before a learner's first step, whatever its model: its ratios are 1, and what was sampled is what is
trained.

Dropout, noise, numbers of a row that depend on the rows beside it, and samples of other weights would train another
policy than the one that speaks, and say nothing. Each check is made once, and ends the run.
"""

import logging
from functools import partial

from torch import Tensor

from trl_ext.errors import UserError
from trl_ext.learning.learner import Learner
from trl_ext.learning.metrics import Metrics
from trl_ext.models.forward import base_of
from trl_ext.models.randomness import first_difference
from trl_ext.ppo.batch import TokenBatch, placeholder
from trl_ext.process import distributed

logger = logging.getLogger(__name__)

MOST_KL = {False: 1e-6, True: 5e-3}
"""The largest ``approx_kl`` of a first minibatch, in float32 and (True) where forwards are rounded to half precision.
"""
ROUNDED_KL = 0.05
"""As above, where forwards are rounded and two forwards of the same rows are equal: rows are padded and dealt
differently."""
MOST_GAP = {False: 0.1, True: 0.3}
"""The largest ``engine_gap`` of a first update, in nats a token, in float32 and (True) where forwards are rounded."""


class ForwardsDiffer(UserError, RuntimeError):
    """Before any step, log-probabilities of the same tokens under the same weights differ."""


def check_unmoved(learner: Learner, rows: TokenBatch, index: Tensor, measures: Metrics) -> None:
    """Check in the first minibatch that a learner trains that the KL divergence from before is 0, so that ratios are 1.

    ``measures`` are what :meth:`Learner.accumulate` returned for the minibatch ``index`` of ``rows``, before any step.
    All processes call this together.

    Raises:
        ForwardsDiffer: it is not. The message names the first layer whose output differs between two forwards. Or most
            of what is trained has no gradient.
    """
    if learner.checked:
        return
    learner.checked = not rows.critic_only  # while only the critic learns, the policy has no gradients to look at
    _check_gradients(learner, rows)
    kl, limit = measures["approx_kl"], MOST_KL[learner.rounded]
    if kl <= limit:
        return
    parts = learner.microbatches(rows, index)
    microbatch = rows.take(parts[0]) if parts else placeholder(rows.input_ids.device)
    with learner.policy.active():
        layer = first_difference(learner.model, lambda: learner.strategy.call(partial(learner.forward, microbatch)))
    layers = [name for name in distributed.all_gather(layer) if name is not None]
    if not layers and learner.rounded and kl <= ROUNDED_KL:
        return
    why = (
        f"the output of {layers[0]!r} differs between two forwards of the same rows: it draws random numbers, or keeps "
        "a state; set its dropout or noise to 0 in the model's configuration"
        if layers
        else "two forwards of the same rows are equal, so that the numbers of a row depend on the rows beside it or on its "  # noqa: E501
        "padding; set per_device_train_batch_size: 1, or use another attn_implementation"
    )
    raise ForwardsDiffer(
        f"policy {learner.name!r}: before its first step the mean ratio of new and old probabilities is "
        f"{measures['ratio']:.4g} and their KL divergence {kl:.2g}; expected 1 and 0 (at most {limit:g}): {why}"
    )


def _check_gradients(learner: Learner, rows: TokenBatch) -> None:
    """Check that most of what the policy trains is in the graph of its log-probabilities, and name what is not."""
    # Models have parts that a forward does not use, or uses past their layer, so that an adapter of it does nothing.
    # Gradients are seen only where a single process holds them.
    elsewhere = learner.strategy.sharded or learner.strategy.half or distributed.size() > 1
    if rows.critic_only or elsewhere or not len(rows):
        return
    named = {name: p for name, p in learner.policy.parameters().items() if p.requires_grad}
    lost = [name for name, parameter in named.items() if parameter.grad is None]
    unreached = [name for name in lost if "expert" in name]  # a small minibatch does not reach every expert
    if 2 * (len(lost) - len(unreached)) > len(named) - len(unreached):
        raise ForwardsDiffer(
            f"policy {learner.name!r}: {len(lost)} of {len(named)} parameters got no gradient in the first minibatch, "
            f"such as {lost[0]!r}, so they would never learn; {type(base_of(learner.model)).__name__} does not train "
            "in evaluation mode, or does not use them: train other modules, or use another model"
        )
    if lost:
        logger.warning(
            "policy %r: %d of %d parameters got no gradient in the first minibatch, such as %r: the model does not "
            "use them for text, or not through their layer, so they will not learn",
            learner.name, len(lost), len(named), lost[0],
        )  # fmt: skip


def check_samples(learner: Learner, rows: TokenBatch | None, gap: tuple[float, float]) -> None:
    """Check that what samples and what learns agreed in the first update, whose tokens no other weights have sampled.

    ``gap`` is the mean of |trainer - engine| and that of engine - trainer, in nats a token. Sampling that leaves out
    the tail of a distribution makes all probabilities larger and none smaller, so that there only smaller ones count.

    Raises:
        ForwardsDiffer: they did not.
    """
    distance, difference = gap
    drawn, limit = learner.args.decoding, MOST_GAP[learner.rounded]
    per_row = rows is not None and not bool(rows.temperature.isnan().all())  # rows with options of their own
    counted = (distance - difference) / 2 if drawn.cut or per_row else distance
    if counted <= limit:
        return
    who = f"policy {learner.name!r}" + ("" if learner.adapter is None else f", adapter {learner.adapter!r}")
    raise ForwardsDiffer(
        f"{who}: before any update, the log-probabilities of its tokens differ by {distance:.2g} nats a token between "
        f"what sampled them and what is trained (expected at most {limit}), so another policy would be trained than "
        "the one that speaks; use engine: transformers, whose samples come from the weights that are trained, or of a "
        "server check the model, the dtype and --logprobs-mode processed_logprobs"
    )
