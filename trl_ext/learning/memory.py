"""How many tokens a training forward can read in the memory that is free."""

import math
from collections.abc import Callable, Collection

import torch

from trl_ext.errors import UserError
from trl_ext.learning.learner import Learner
from trl_ext.models.forward import base_of
from trl_ext.models.shape import PLANNED, Shape, training_bytes


class DoesNotFit(UserError, MemoryError):
    """A device is too small for what is trained on it. The message has the sizes, and settings that need less."""


def fitting_tokens(learners: Collection[Learner], free: int, device: torch.device) -> int:
    """Return the most tokens that one training forward can read on a device with ``free`` bytes.

    The learners share the device. Gradients and moments that they have not allocated yet are counted. All tokens may be
    sampled ones, and each learner may keep the graph of one forward. The result is a power of two, so that
    small differences in free memory cut the same micro-batches.

    Raises:
        DoesNotFit: gradients and moments need more than is free.
    """
    to_come = sum(map(_to_come, learners))
    left = PLANNED * (free - to_come)
    shapes = [(learner, Shape.of(base_of(learner.model), base_of(learner.model).dtype)) for learner in learners]
    chunk = next(iter(learners)).args.logits_chunk
    if chunk is not None:
        left -= max(shape.logits(chunk) for _, shape in shapes)
    if left <= 0:
        raise DoesNotFit(
            f"{device}: {free / 2**30:.1f} GiB are free, and gradients and moments of {len(learners)} policies need "
            f"{to_come / 2**30:.1f} GiB before any activation; train LoRAs (agents.NAME.lora), set training.optim: "
            "adamw_bnb_8bit, or start with zero3.yaml or fsdp2.yaml on more devices"
        )
    each = 0.0
    for learner, shape in shapes:
        each += learner.critic.trunks * shape.activations(1, bool(learner.args.gradient_checkpointing))
        each += shape.logits(1) if chunk is None else 0.0
    return 2 ** max(0, int(math.log2(max(1.0, left / each))))


def limit_microbatches(learners: Collection[Learner], free_of: Callable[[torch.device], int | None]) -> None:
    """Choose how many tokens a training forward of each learner reads on an accelerator, unless the options say it.

    ``free_of`` returns the free bytes of a device (:func:`trl_ext.process.devices.free_bytes`).

    Raises:
        DoesNotFit: gradients and moments need more than is free.
    """
    devices: dict[torch.device, list[Learner]] = {}
    for learner in learners:
        if learner.args.max_tokens_per_microbatch is None and learner.device.type != "cpu":
            devices.setdefault(learner.device, []).append(learner)
    for device, group in devices.items():
        free = free_of(device)
        tokens = None if free is None else fitting_tokens(group, free, device)
        for learner in group:
            learner.most_tokens = tokens


def _to_come(learner: Learner) -> float:
    """Return the bytes of gradients, and of the two moments of AdamW before the first step, in this process."""
    each = training_bytes(2 if learner.strategy.half else 4, str(learner.args.optim))
    return learner.strategy.stepped_here() * (each.gradients + (0.0 if learner.optimizer.state else each.moments))
