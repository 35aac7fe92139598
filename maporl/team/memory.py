"""Estimate the memory of a run from its configuration. ``maporl check`` prints the estimate."""

import json
import os
from functools import cache
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from maporl.config.engines import ENGINES
from maporl.config.schema import AgentSection, Config, LoraSection, TinySection
from maporl.errors import ConfigError
from maporl.protocols import policy_names
from maporl.run import ResolvedRun
from maporl.team.loading import base_owners, lora_config
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.learning.critics import CRITICS, AdapterCritic, CentralValues, ModelCritic
from trl_ext.models.adapters import fitted
from trl_ext.models.shape import Shape, training_bytes
from trl_ext.models.weights import check_adapter_source, read_pretrained

LIBRARIES = 0.55e9
"""Bytes of a CPU process that has imported torch, transformers, PEFT and TRL."""
FIXED = ("weights", "references", "gradients", "optimizer")
"""The parts of the estimate that do not depend on how much is read at a time."""


def estimate(run: ResolvedRun, longest: int, dialogues: int) -> dict[str, float]:
    """Return the bytes by purpose at the peak of an update, for one process that holds everything.

    ``longest`` is the number of tokens of the longest conversation, and ``dialogues`` the number of dialogues for each
    question. The peak is in the backward pass of the largest
    policy. The other policies then hold the forwards that they keep for their first step.
    """
    config, ppo, training = run.config, run.config.ppo, run.config.training
    parts = dict.fromkeys(("weights", "references", "gradients", "optimizer", "activations", "logits"), 0.0)
    bases: set[Any] = set()
    rows, played = training.per_device_train_batch_size, config.questions_per_update() * dialogues
    most = max(run.sampling.longest(name, ppo.response_length) for name in config.agents)
    steps = max((config.of(name).ppo.num_mini_batches for name in run.learners), default=ppo.num_mini_batches)
    once = steps == 1 and played <= rows and not training.gradient_checkpointing
    read, scored = rows * longest, rows * most * run.protocol.turns
    if ppo.max_tokens_per_microbatch is not None:
        scored = min(scored, ppo.max_tokens_per_microbatch)  # what the answers share, such as a prompt, is read once
        once, read = once and read <= ppo.max_tokens_per_microbatch, min(read, ppo.max_tokens_per_microbatch)
    peaks = []
    for name, section in config.agents.items():
        if not section.weights:
            continue
        shape = shape_of(section)
        adapter = section.lora is not None or section.adapter is not None
        for policy in policy_names(name, section, config):
            trained = adapter_parameters(section) if adapter else shape.parameters
            key = (section.model, section.dtype) if adapter and section.tiny is None else policy
            if key in bases and not adapter:
                continue
            stored = 0.56 if section.load_in_4bit else 1.06 if section.load_in_8bit else shape.bytes
            parts["weights"] += 0 if key in bases else shape.parameters * stored
            bases.add(key)
            parts["weights"] += trained * shape.bytes if adapter else 0
            if not section.trainable:
                continue
            own = config.of(name)
            critic = CRITICS[own.training.critic]
            copies = 2 if critic in (ModelCritic, AdapterCritic) else 1  # the critic trains as many weights of its own
            if critic is CentralValues and "central critic" not in bases:  # one for all, whole and in float32
                bases.add("central critic")
                parts["weights"] += shape.parameters * 4
                each = training_bytes(4, training.optim)
                parts["gradients"] += shape.parameters * each.gradients
                parts["optimizer"] += shape.parameters * each.moments
            parts["references"] += shape.parameters * shape.bytes if own.ppo.kl_coef and not adapter else 0
            parts["weights"] += shape.parameters * shape.bytes if critic is ModelCritic else 0
            parts["weights"] += (copies - 1) * trained * shape.bytes if adapter else 0
            each = training_bytes(shape.bytes, training.optim)
            parts["gradients"] += copies * trained * each.gradients
            parts["optimizer"] += copies * trained * (each.copy + each.moments)
            activations = critic.trunks * shape.activations(read, training.gradient_checkpointing)
            peaks.append(
                (activations, shape.logits(scored if ppo.logits_chunk is None else min(scored, ppo.logits_chunk)))
            )
    if peaks:
        counted = peaks if once else [max(peaks)]
        parts["activations"], parts["logits"] = sum(a for a, _ in counted), sum(b for _, b in counted)
    return parts


def line(run: ResolvedRun, longest: int, dialogues: int) -> str:
    """Return the estimate as one line of text."""
    parts = estimate(run, longest, dialogues)
    total = sum(parts.values()) + (LIBRARIES if training_on_cpu(run.config) else 0.0)
    shown = ", ".join(f"{what} {size / 2**30:.1f}" for what, size in parts.items() if size > 0.02 * total)
    return f"memory: about {total / 2**30:.1f} GiB for a process that holds everything{f' ({shown})' if shown else ''}"


def device_lines(run: ResolvedRun, longest: int, dialogues: int, total: int | None) -> list[str]:
    """Return a line about the accelerator, and a warning with settings to change if the run does not fit.

    ``total`` is the memory in bytes of the accelerator, or the main memory of a run on the CPU. If it is None, the list
    is empty. What is needed is an estimate, so a run that may not fit is warned of, and begins.

    Raises:
        ConfigError: a single process holds the run, and its weights alone do not fit. A run that does not ask for the
            CPU, on a machine without an accelerator, is only warned of.
    """
    if total is None:
        return []
    config = run.config
    cpu, bounded = training_on_cpu(config), config.ppo.max_tokens_per_microbatch is not None
    where = "main memory has" if cpu else "the device has"
    if config.training.placement == "split" and not cpu:
        total, where = total * len(base_owners(config)), "the devices have"
    parts = estimate(run, longest, dialogues)
    cache = kv_cache(config, longest, dialogues)
    # on accelerators a limit of micro-batches is chosen so that they fit
    moving = parts["activations"] + parts["logits"] if cpu or bounded else 0.0
    needed = sum(parts[what] for what in FIXED) + max(cache, moving) + (LIBRARIES if cpu else 0.0)
    lines = []
    if not cpu:
        more = "" if config.ppo.local_rollout_forward_batch_size else " or takes up to a quarter of what is free"
        lines.append(
            f"device: {total / 2**30:.1f} GiB; a batch of sampling needs about {cache / 2**30:.1f} GiB of KV cache"
            f"{more}, and states kept between turns at most half of what is free"
            + ("" if bounded else "; ppo.max_tokens_per_microbatch is chosen from the free memory")
        )
    if needed <= total:
        return lines
    needs = (
        f"the run needs about {needed / 2**30:.1f} GiB in one process, and {where} {total / 2**30:.1f}: weights "
        f"{parts['weights'] / 2**30:.1f}, references {parts['references'] / 2**30:.1f}, gradients "
        f"{parts['gradients'] / 2**30:.1f}, optimizer {parts['optimizer'] / 2**30:.1f}, micro-batches "
        f"{moving / 2**30:.1f}, sampling {cache / 2**30:.1f}"
    )
    advice = _advice(parts, cache, moving, cpu, bounded)
    elsewhere = cpu and not config.training.use_cpu  # a run for accelerators may be checked on a laptop
    if parts["weights"] > total and int(os.environ.get("WORLD_SIZE", "1")) == 1 and not elsewhere:
        raise ConfigError(f"agents: their weights alone do not fit: {needs}; set {advice}, or use smaller models")
    return [*lines, f"warning: {needs}; set {advice}"]


def _advice(parts: dict[str, float], cache: float, moving: float, cpu: bool, bounded: bool) -> str:
    """Return the settings that need less of what needs most."""
    changes = {
        "optimizer": "training.optim: adamw_bnb_8bit, or agents.NAME.lora",
        "references": "ppo.kl_coef: 0, or agents.NAME.lora",
        "gradients": "agents.NAME.lora",
        "weights": "agents.NAME.lora on one model for several agents, or load_in_4bit with it",
    }
    largest = max(changes, key=lambda what: parts[what])
    if moving >= cache and moving > parts[largest]:
        fewer = "a smaller ppo.max_tokens_per_microbatch" if bounded else "ppo.max_tokens_per_microbatch"
        return f"{fewer}{'' if cpu else ', or null'}, or use training.gradient_checkpointing: true"
    if cache > parts[largest]:
        return "a smaller ppo.local_rollout_forward_batch_size, or use ppo.max_tokens_per_generate"
    return f"{changes[largest]}, or use zero3.yaml or fsdp2.yaml on more {'machines' if cpu else 'devices'}"


def kv_cache(config: Config, longest: int, dialogues: int) -> float:
    """Return the bytes of KV cache that the largest batch of sampling needs with the transformers engine.

    An accelerator samples more rows at a time only where they take little of what is free, so a run needs no more.
    """
    ppo = config.ppo
    rows = min(ppo.batch_rows, config.questions_per_update() * dialogues)
    tokens = rows * longest
    if ppo.max_tokens_per_generate is not None:
        tokens = min(tokens, max(ppo.max_tokens_per_generate, longest))
    here = [s for s in config.agents.values() if s.weights and not ENGINES[s.engine].remote]
    return max((shape_of(section).kv_cache(tokens) for section in here), default=0.0)


def training_on_cpu(config: Config) -> bool:
    """Return whether the run's process holds everything in main memory."""
    return config.training.use_cpu or not torch.accelerator.is_available()


def shape_of(section: AgentSection) -> Shape:
    """Return the sizes of an agent's model, from its configuration. No weights are read."""
    return _shape(section.model, section.tiny, section.dtype)


def adapter_parameters(section: AgentSection) -> int:
    """Return the number of weights of an agent's new LoRA, or of its saved adapter. PEFT builds it without weights.

    Raises:
        WeightsError: the saved one cannot be used here.
    """
    new = section.adapter is None
    options = lora_config(section.lora or LoraSection()) if new else check_adapter_source(str(section.adapter))
    return _adapter_parameters(
        section.model, section.tiny, json.dumps(options.to_dict(), sort_keys=True, default=sorted)
    )


@cache
def _shape(name: str | None, tiny: TinySection | None, wanted: str) -> Shape:
    model = _without_weights(name, tiny)
    return Shape.of(model, model.dtype if wanted == "auto" else getattr(torch, wanted))


@cache
def _adapter_parameters(name: str | None, tiny: TinySection | None, adapter: str) -> int:
    """``adapter`` has the options of PEFT as JSON. Counting takes seconds, so it is done once for equal ones."""
    options = PeftConfig.from_peft_type(**json.loads(adapter))
    options.inference_mode = False  # a saved adapter says that it is not trained
    model = _without_weights(name, tiny)
    with torch.device("meta"):
        return int(get_peft_model(model, fitted(options, model)).get_nb_trainable_parameters()[0])


def _without_weights(name: str | None, tiny: TinySection | None) -> Any:
    with torch.device("meta"):
        if tiny is not None:
            return build_tiny_model(tiny, build_tiny_tokenizer(tiny))
        return AutoModelForCausalLM.from_config(read_pretrained(AutoConfig, str(name)), trust_remote_code=False)
