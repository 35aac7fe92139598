"""Estimate the memory of a run from its configuration. ``maporl check`` prints the estimate."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maporl.config.schema import AgentSection, Config, TinySection
from maporl.protocols import turns_of
from maporl.team.loading import policy_names
from maporl.team.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.weights import read_pretrained

LIBRARIES = 0.55e9
"""Bytes of a CPU process that has imported torch, transformers, PEFT and TRL."""
ADAM = 2
"""The number of moments that AdamW keeps for each trained parameter."""
EIGHT_BIT = 1 + 4 / 256
"""Bytes of a moment in an 8-bit optimizer, which has one float32 scale for 256 moments."""


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

    def activations(self, tokens: int, checkpointing: bool) -> float:
        """Return the bytes that the backward pass needs of each forward.

        A layer keeps about eight tensors of the hidden size and four of the intermediate size for each token.
        """
        layer = self.bytes * (8 * self.hidden + 4 * self.intermediate)
        return tokens * ((self.layers * self.bytes * self.hidden + layer) if checkpointing else self.layers * layer)

    def logits(self, tokens: int) -> float:
        """Return the bytes of logits for ``tokens`` tokens, of their float32 copies, and of the gradients of both."""
        return tokens * self.vocabulary * 2 * (self.bytes + 4)


def estimate(config: Config, longest: int, dialogues: int) -> dict[str, float]:
    """Return the bytes by purpose at the peak of an update, for one process that holds everything.

    ``longest`` is the number of tokens of the longest conversation, and ``dialogues`` the number of dialogues for each
    question. The peak is in the backward pass of the largest
    policy. The other policies then hold the forwards that they keep for their first step.
    """
    ppo, training = config.ppo, config.training
    parts = dict.fromkeys(("weights", "references", "gradients", "optimizer", "activations", "logits"), 0.0)
    bases: set[Any] = set()
    rows, played = training.per_device_train_batch_size, config.questions_per_update() * dialogues
    once = ppo.num_mini_batches == 1 and played <= rows and not training.gradient_checkpointing
    read, scored = rows * longest, rows * ppo.response_length * turns_of(config)
    if ppo.max_tokens_per_microbatch is not None:
        scored = int(scored * min(1.0, ppo.max_tokens_per_microbatch / read))
        once, read = once and read <= ppo.max_tokens_per_microbatch, min(read, ppo.max_tokens_per_microbatch)
    peaks = []
    for name, section in config.agents.items():
        if not section.weights:
            continue
        shape = shape_of(section)
        adapter = section.lora is not None or section.adapter is not None
        for policy in policy_names(name, section, config):
            trained = _lora_parameters(shape, section) if adapter else shape.parameters
            key = (section.model, section.dtype) if adapter and section.tiny is None else policy
            if key in bases and not adapter:
                continue
            stored = 0.56 if section.load_in_4bit else 1.06 if section.load_in_8bit else shape.bytes
            parts["weights"] += 0 if key in bases else shape.parameters * stored
            bases.add(key)
            parts["weights"] += trained * shape.bytes if adapter else 0
            if not section.trainable:
                continue
            critic = section.critic or training.critic
            copies = 2 if critic == "model" else 1
            if critic == "central" and "central critic" not in bases:  # one for all, whole and in float32
                bases.add("central critic")
                parts["weights"] += shape.parameters * 4
                parts["gradients"] += shape.parameters * 4
                parts["optimizer"] += shape.parameters * ADAM * (EIGHT_BIT if "8bit" in training.optim else 4)
            masters = 4 if shape.bytes == 2 else 0  # float32 copies of half-precision weights
            parts["references"] += shape.parameters * shape.bytes if ppo.kl_coef and not adapter else 0
            parts["weights"] += (copies - 1) * shape.parameters * shape.bytes
            # one micro-batch has gradients in the dtype of the weights, which are added to float32 sums
            parts["gradients"] += copies * trained * (4 + (shape.bytes if masters else 0))
            moment = EIGHT_BIT if "8bit" in training.optim else 4
            parts["optimizer"] += copies * trained * (masters + ADAM * moment)
            activations = (2 if critic == "central" else copies) * shape.activations(
                read, training.gradient_checkpointing
            )
            peaks.append(
                (activations, shape.logits(scored if ppo.logits_chunk is None else min(scored, ppo.logits_chunk)))
            )
    if peaks:
        kept = peaks if once else [max(peaks)]
        parts["activations"], parts["logits"] = sum(a for a, _ in kept), sum(b for _, b in kept)
    return parts


def line(config: Config, longest: int, dialogues: int) -> str:
    """Return the estimate as one line of text."""
    parts = estimate(config, longest, dialogues)
    total = sum(parts.values()) + (LIBRARIES if training_on_cpu(config) else 0.0)
    shown = ", ".join(f"{what} {size / 2**30:.1f}" for what, size in parts.items() if size > 0.02 * total)
    return f"memory: about {total / 2**30:.1f} GiB for a process that holds everything{f' ({shown})' if shown else ''}"


def training_on_cpu(config: Config) -> bool:
    """Return whether the run's process holds everything in main memory."""
    return config.training.use_cpu or not torch.accelerator.is_available()


def shape_of(section: AgentSection) -> Shape:
    """Return the sizes of an agent's model, from its configuration. No weights are read."""
    return _shape(section.model, section.tiny, section.dtype)


@cache
def _shape(name: str | None, tiny: TinySection | None, wanted: str) -> Shape:
    with torch.device("meta"):
        if tiny is not None:
            model: Any = build_tiny_model(tiny, build_tiny_tokenizer(tiny))
        else:
            model = AutoModelForCausalLM.from_config(read_pretrained(AutoConfig, str(name)), trust_remote_code=False)
    text = model.config.get_text_config()
    dtype = model.dtype if wanted == "auto" else getattr(torch, wanted)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
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


def _lora_parameters(shape: Shape, section: AgentSection) -> int:
    """Return the number of parameters of a LoRA on all linear layers. On fewer layers it is smaller."""
    rank = section.lora.r if section.lora is not None else 16
    layer = 4 * shape.hidden + 2 * shape.keys + 2 * shape.hidden + 3 * (shape.hidden + shape.intermediate)
    return rank * layer * shape.layers
