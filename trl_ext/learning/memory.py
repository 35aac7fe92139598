"""The memory of a model by its sizes, and how many tokens a training forward can read in what is free."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.errors import UserError
from trl_ext.learning.learner import Learner
from trl_ext.models.forward import base_of

EIGHT_BIT = 1 + 4 / 256
"""Bytes of a moment in an 8-bit optimizer, which has one float32 scale for 256 moments."""
SHARE = 0.8
"""The share of the free memory that is planned for. The rest is for fragments and for what is not counted."""


class DoesNotFit(UserError, MemoryError):
    """A device is too small for what is trained on it. The message has the sizes, and settings that need less."""


@dataclass
class Shape:
    """The sizes of a model that determine its memory. ``keys`` is the width of all key heads, ``bytes`` of a weight.

    ``matrices`` are the names of the modules whose weight is a matrix, which are those that a LoRA can adapt.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    keys: int
    vocabulary: int
    bytes: int
    matrices: tuple[str, ...]

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> "Shape":
        """Return the sizes of a Hugging Face model whose weights are in ``dtype``."""
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1  # recurrent models have none
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            keys=head * (getattr(text, "num_key_value_heads", None) or heads),
            vocabulary=text.vocab_size,
            bytes=dtype.itemsize,
            matrices=tuple(
                name.removesuffix(".weight")
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if name.endswith(".weight") and parameter.ndim > 1
            ),
        )

    def activations(self, tokens: int, checkpointing: bool) -> float:
        """Return the bytes that the backward pass needs of each forward.

        A layer keeps about eight tensors of the hidden size and four of the intermediate size for each token.
        """
        layer = self.bytes * (8 * self.hidden + 4 * self.intermediate)
        return tokens * ((self.layers * self.bytes * self.hidden + layer) if checkpointing else self.layers * layer)

    def logits(self, tokens: int) -> float:
        """Return the bytes of logits for ``tokens`` tokens, of their float32 copies, and of the gradients of both."""
        return tokens * self.vocabulary * 2 * (self.bytes + 4)

    def kv_cache(self, tokens: int) -> float:
        """Return the bytes of the keys and values of ``tokens`` tokens."""
        return tokens * self.layers * 2 * self.keys * self.bytes


def fitting_tokens(learners: Collection[Learner], free: int, device: torch.device) -> int:
    """Return the most tokens that one training forward can read on a device with ``free`` bytes.

    The learners share the device. Gradients and moments that they have not allocated yet are counted. All tokens may be
    sampled ones, and each learner may keep the graph of one forward. The result is a power of two, so that
    small differences in free memory cut the same micro-batches.

    Raises:
        DoesNotFit: gradients and moments need more than is free.
    """
    to_come = sum(map(_to_come, learners))
    left = SHARE * (free - to_come)
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
        trunks = 2 if learner.critic in ("model", "adapter", "central") else 1
        each += trunks * shape.activations(1, bool(learner.args.gradient_checkpointing))
        each += shape.logits(1) if chunk is None else 0.0
    return 2 ** max(0, int(math.log2(max(1.0, left / each))))


def limit_microbatches(learners: Collection[Learner], free_of: Callable[[torch.device], int | None]) -> None:
    """Choose how many tokens a training forward of each learner reads on an accelerator, unless the options say it.

    ``free_of`` returns the free bytes of a device (:func:`trl_ext.process.free_memory.free_bytes`).

    Raises:
        DoesNotFit: gradients and moments need more than is free.
    """
    devices: dict[torch.device, list[Learner]] = {}
    for learner in learners:
        if learner.args.max_tokens_per_microbatch is None and learner.device.type != "cpu":
            devices.setdefault(learner.device, []).append(learner)
    for device, own in devices.items():
        free = free_of(device)
        tokens = None if free is None else fitting_tokens(own, free, device)
        for learner in own:
            learner.most_tokens = tokens


def _to_come(learner: Learner) -> float:
    """Return the bytes of gradients, and of the two moments of AdamW before the first step, in this process."""
    moment = EIGHT_BIT if "8bit" in str(learner.args.optim) else 4
    moments = 0.0 if learner.optimizer.state else 2 * moment
    gradients = 4 + (2 if learner.strategy.half else 0)  # float32 sums, and those of one micro-batch
    return learner.strategy.stepped_here() * (gradients + moments)
