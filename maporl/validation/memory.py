"""How much memory a run will take, from its configuration: what ``maporl check`` prints."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maporl.config.schema import AgentSection, Config, TinySection
from maporl.protocols import turns_of
from maporl.team.loading import policy_names
from maporl.team.tiny import build_tiny_model, build_tiny_tokenizer

LIBRARIES = 0.55e9
"""Bytes of a CPU process that has imported torch, transformers, PEFT and TRL."""
ADAM = 2
"""Numbers that AdamW keeps for every one that it trains."""
EIGHT_BIT = 1 + 4 / 256
"""Bytes of such a number where the optimizer keeps 8 bits of it, and a scale for 256 of them."""


@dataclass
class Shape:
    """The sizes of a model that its memory depends on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    keys: int
    vocabulary: int
    bytes: int

    def activations(self, tokens: int, checkpointing: bool) -> float:
        """Bytes kept for the backward pass: about eight tensors of the hidden and four of the intermediate size per layer."""
        layer = self.bytes * (8 * self.hidden + 4 * self.intermediate)
        return tokens * ((self.layers * self.bytes * self.hidden + layer) if checkpointing else self.layers * layer)

    def logits(self, tokens: int) -> float:
        """Bytes of logits, their float32 copies and the gradients of both."""
        return tokens * self.vocabulary * 2 * (self.bytes + 4)


def estimate(config: Config, longest: int) -> dict[str, float]:
    """Bytes by purpose at the peak of an update, for one process that holds everything; ``longest``: tokens of a conversation.

    The peak is in the backward pass of the largest policy, with the forwards that the others keep for their first step.
    """
    ppo, training = config.ppo, config.training
    parts = dict.fromkeys(("weights", "references", "gradients", "optimizer", "activations", "logits"), 0.0)
    bases: set[Any] = set()
    rows = min(training.per_device_train_batch_size, config.questions_per_update())
    once = (
        ppo.num_mini_batches == 1 and training.gradient_accumulation_steps == 1 and not training.gradient_checkpointing
    )
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
        for policy in policy_names(name, section, turns_of(config)):
            own = _lora_parameters(shape, section) if adapter else shape.parameters
            key = (section.model, section.dtype) if adapter and section.tiny is None else policy
            if key in bases and not adapter:
                continue
            stored = 0.56 if section.load_in_4bit else 1.06 if section.load_in_8bit else shape.bytes
            parts["weights"] += 0 if key in bases else shape.parameters * stored
            bases.add(key)
            parts["weights"] += own * shape.bytes if adapter else 0
            if not section.trainable:
                continue
            copies = 2 if (section.critic or training.critic) == "model" else 1
            masters = 4 if adapter and shape.bytes == 2 else 0  # float32 copies of adapters, and float32 moments
            parts["references"] += shape.parameters * shape.bytes if ppo.kl_coef and not adapter else 0
            parts["weights"] += (copies - 1) * shape.parameters * shape.bytes
            parts["gradients"] += copies * own * shape.bytes
            moment = EIGHT_BIT if "8bit" in training.optim else 4 if masters else shape.bytes
            parts["optimizer"] += copies * own * (masters + ADAM * moment)
            activations = copies * shape.activations(read, training.gradient_checkpointing)
            peaks.append(
                (activations, shape.logits(scored if ppo.logits_chunk is None else min(scored, ppo.logits_chunk)))
            )
    if peaks:
        kept = peaks if once else [max(peaks)]
        parts["activations"], parts["logits"] = sum(a for a, _ in kept), sum(b for _, b in kept)
    return parts


def line(config: Config, longest: int) -> str:
    """The estimate in one line."""
    parts = estimate(config, longest)
    total = sum(parts.values()) + (LIBRARIES if training_on_cpu(config) else 0.0)
    shown = ", ".join(f"{what} {size / 2**30:.1f}" for what, size in parts.items() if size > 0.02 * total)
    return f"memory: about {total / 2**30:.1f} GiB for a process that holds everything ({shown})"


def training_on_cpu(config: Config) -> bool:
    """Whether the run's process has everything in main memory."""
    return config.training.use_cpu or not torch.cuda.is_available()


def shape_of(section: AgentSection) -> Shape:
    """A model's sizes, from its configuration; no weights are read."""
    return _shape(section.model, section.tiny, section.dtype)


@cache
def _shape(name: str | None, tiny: TinySection | None, wanted: str) -> Shape:
    with torch.device("meta"):
        if tiny is not None:
            model: Any = build_tiny_model(tiny, build_tiny_tokenizer(tiny))
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(name)))
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
    )


def _lora_parameters(shape: Shape, section: AgentSection) -> int:
    """Of a LoRA on all linear layers; on fewer it is less."""
    rank = section.lora.r if section.lora is not None else 16
    layer = 4 * shape.hidden + 2 * shape.keys + 2 * shape.hidden + 3 * (shape.hidden + shape.intermediate)
    return rank * layer * shape.layers
