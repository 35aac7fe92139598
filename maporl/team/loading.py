"""Load a team. Tokenizers are loaded and checked before the models. Adapters of the same model share one base."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)

from maporl.config import Config
from maporl.config.engines import has_weights
from maporl.config.schema import AgentSection, LoraSection
from maporl.errors import ConfigError, Fault, one_line, refuse
from maporl.protocols import policy_names
from maporl.team.agents import Agent, Policy
from maporl.text import read_users_text
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.chat.encoding import FALLBACK_TEMPLATE, ChatError, Tokenizer, context_of, encode_prompt
from trl_ext.errors import retold
from trl_ext.models.forward import base_of
from trl_ext.models.weights import (
    WeightsError,
    add_adapter,
    check_adapter_source,
    read_adapter,
    read_model,
    read_pretrained,
)
from trl_ext.process import distributed, hub
from trl_ext.process.devices import accelerator, accelerators

Bases = dict[tuple, PeftModel]
"""The base models that adapters share, by :func:`base_key`."""


def base_key(section: AgentSection) -> tuple:
    """Return what agents with an adapter must have in common to share a base model."""
    return (section.model, section.dtype, section.attn_implementation, section.load_in_4bit, section.load_in_8bit)


def base_owners(config: Config) -> dict[tuple, str]:
    """Return each base model that a run holds, by a key, with the name of the first policy that has it.

    Policies with a LoRA on the same model share a base. A pool of past opponents copies the model of a policy without a
    LoRA.
    """
    owners: dict[tuple, str] = {}
    for name, section in config.agents.items():
        for policy in policy_names(name, section, config) if section.weights else ():
            owners.setdefault(_owner_key(policy, section), policy)
    pool = config.schedule.opponent_pool
    if pool is not None and pool.of in config.agents:
        section = config.agents[pool.of]
        if section.weights and not (section.lora or section.adapter):
            past = f"{policy_names(pool.of, section, config)[0]}-past"
            owners[_owner_key(past, section)] = past
    return owners


def _owner_key(policy: str, section: AgentSection) -> tuple:
    shares = section.tiny is None and (section.lora or section.adapter)
    return base_key(section) if shares else (policy,)


def quantized_places(config: Config) -> dict[tuple, torch.device]:
    """Return the device of each base model, by the keys of :func:`base_owners`. Quantised weights are loaded there.

    They cannot move later, and would otherwise all be loaded onto this process's present accelerator.

    Raises:
        ConfigError: the devices are fewer than the base models, with ``placement: split``.
    """
    owners = base_owners(config)
    if config.training.placement == "split":
        with retold(ValueError, lambda error: ConfigError(f"training.{error}")):
            return dict(zip(owners, split(list(owners.values()), config.training.use_cpu), strict=True))
    return dict.fromkeys(owners, own_device(config.training.use_cpu))


def load_agents(
    config: Config,
    tokenizers: Mapping[str, Tokenizer],
    weights: bool = True,
    bases: Bases | None = None,
    receives: bool = False,
    only: Collection[str] | None = None,
) -> list[Agent]:
    """Load every agent of ``config`` with its model, in speaking order.

    Args:
        config: the configuration.
        tokenizers: each agent's tokenizer.
        weights: False builds models from their configurations, without reading weights.
        bases: the base models that earlier calls have loaded. New ones are added to it.
        receives: whether this process will receive the weights of models from another one. They are then on the meta
            device. It reads adapters itself.
        only: the names of the policies to load. The others are on the meta device. None loads all.

    Raises:
        ConfigError: a model or an adapter cannot be loaded.
    """
    bases = {} if bases is None else bases
    quantized = weights and any(s.load_in_4bit or s.load_in_8bit for s in config.agents.values())
    places = quantized_places(config) if quantized else {}
    loaded: dict[str, Agent] = {}
    agents: list[Agent] = []
    for name, section in config.agents.items():
        learns: dict[str, Any] = {"algorithm": section.learns_by}
        speaker: dict[str, Any] = {k: getattr(section, k) for k in ("role", "system", "engine", "sampling")} | learns
        if not section.weights:
            agents.append(Agent(name, **speaker))
            continue
        for policy in (names := policy_names(name, section, config)):
            if policy not in loaded:
                elsewhere = only is not None and policy not in only
                drawn = elsewhere and section.tiny is not None  # so that the next random model is the same everywhere
                with torch.device("meta") if elsewhere and not drawn else nullcontext():
                    shared_bases = {} if elsewhere else bases
                    read = weights and not elsewhere
                    model = _load_policy(name, policy, section, tokenizers[name], shared_bases, read, places, receives)
                if drawn:
                    model.to("meta")  # type: ignore[arg-type]  # its decorator hides the signature
                adapter = policy if isinstance(model, PeftModel) else None
                loaded[policy] = Agent(
                    policy, model, tokenizers[name], adapter=adapter, trainable=section.trainable, **learns
                )
        if len(names) > 1:
            agents.append(Agent(name, by_turn=tuple(loaded[policy] for policy in names), **speaker))
        else:
            agents.append(replace(loaded[names[0]], name=name, policy=names[0], **speaker))
    return agents


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """Load and check every agent's tokenizer, and check the options of its adapter. No model is loaded.

    Raises:
        ConfigError: a tokenizer cannot be loaded, or lacks something that dialogues need, or an adapter cannot be used
            here.
    """
    tokenizers: dict[str, Tokenizer] = {}

    def faults() -> Iterator[Fault]:
        told: set[str] = set()
        for name, section in config.agents.items():
            source = str(section.tokenizer or section.model)
            if not section.weights or source in told:
                continue  # what several agents have is refused once
            try:
                tokenizers[name] = _tokenizer_of(name, section)
            except ConfigError as error:
                told |= set() if section.tiny is not None else {source}
                yield Fault.of(error)

    refuse(faults())
    return tokenizers


def _tokenizer_of(name: str, section: AgentSection) -> Tokenizer:
    """Return the tokenizer of an agent, checked, and check the options of its adapter."""
    if section.tiny is not None:
        tokenizer = build_tiny_tokenizer(section.tiny)
    else:
        source = section.tokenizer or section.model
        tokenizer = _from_pretrained(
            AutoTokenizer, source, f"agents.{name}.{'tokenizer' if section.tokenizer else 'model'}"
        )
    if section.chat_template is not None:
        tokenizer.chat_template = read_chat_template(section.chat_template, f"agents.{name}.chat_template")
    if section.template_options:
        tokenizer.chat_template = with_options(tokenizer.chat_template, section.template_options, f"agents.{name}")
    if section.pad_token is not None:
        tokenizer.pad_token = section.pad_token
    _check_for_config(name, section, tokenizer)
    if section.adapter is not None:
        with retold(WeightsError, lambda error: ConfigError(f"agents.{name}.adapter: {error}"), cause=True):
            check_adapter_source(section.adapter)
    return tokenizer


def _check_for_config(name: str, section: AgentSection, tokenizer: Tokenizer) -> None:
    where = f"agents.{name}"
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{where}: its tokenizer has no EOS token, so no answer could end; use another tokenizer")
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"{where}: its tokenizer has no pad token; set {where}.pad_token: {tokenizer.eos_token!r}")
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{where}: its tokenizer has no chat template (a base model?); set {where}.chat_template: fallback for "
            "plain 'User:' and 'Assistant:' paragraphs, or the path of a Jinja file"
        )
    _check_vocabulary(where, section, tokenizer)


def _check_vocabulary(where: str, section: AgentSection, tokenizer: Tokenizer) -> None:
    """Check that the template renders a short chat, and that the model knows every token id that text may become."""
    # some tokenizers have added tokens beyond the model's vocabulary, which do no harm if no text is encoded by them
    messages = [{"role": "system", "content": "."}] if section.system else []
    messages += [{"role": role, "content": "."} for role in ("user", "assistant", "user")]
    try:
        ids = encode_prompt(tokenizer, messages)
    except ChatError as error:
        raise ConfigError(f"{where}: {error}, or set {where}.chat_template") from None
    except Exception as error:  # the tokenizers library raises nothing more special
        said = one_line(error, 200)
        raise ConfigError(f"{where}: its tokenizer cannot encode a chat ({said}); use another tokenizer") from error
    size = None if section.model is None else getattr(_text_config(where, section.model), "vocab_size", None)
    highest = max(*ids, tokenizer.vocab_size - 1, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if size is not None and highest >= size:
        raise ConfigError(f"{where}: its tokenizer has ids up to {highest}, its model {size} tokens; use the model's")


def read_chat_template(value: str, where: str) -> str:
    """Return the chat template that ``value`` means: ``fallback``, the text of a template, or the path of a file.

    A value that ends in ``.jinja`` or has no brace is a path. ``where`` names the option in the error.

    Raises:
        ConfigError: the file cannot be read.
    """
    if value == "fallback":
        return FALLBACK_TEMPLATE
    if "{" in value and not value.endswith(".jinja"):
        return value
    try:
        return read_users_text(Path(value))
    except (OSError, UnicodeError):
        raise ConfigError(f"{where}: {value!r:.80} cannot be read; give fallback or a template") from None


def with_options(template: Any, options: Mapping[str, bool | int | float | str], where: str) -> str:
    """Return a chat template with values for variables that it uses, such as ``enable_thinking`` of Qwen3's.

    The values are set at its beginning. So they are saved with the tokenizer, and every use of it has them.

    Raises:
        ConfigError: the template does not use a variable, or there is not exactly one template. The message begins with
            ``where``.
    """
    if not isinstance(template, str):
        raise ConfigError(f"{where}.template_options: its tokenizer has no chat template; set {where}.chat_template")
    for name in options:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise ConfigError(f"{where}.template_options: its chat template does not use {name!r}; remove it")
    return "".join(f"{{% set {name} = {json.dumps(value)} %}}" for name, value in options.items()) + template


def _load_policy(
    agent: str,
    policy: str,
    section: AgentSection,
    tokenizer: Tokenizer,
    bases: Bases,
    weights: bool,
    places: Mapping[tuple, torch.device],
    receives: bool,
) -> PreTrainedModel | PeftModel:
    """Load the model of a policy. Policies with a LoRA on the same model and dtype share its base."""
    key, adapted = base_key(section), bool(section.lora or section.adapter)
    if section.tiny is not None:
        base: Any = build_tiny_model(section.tiny, tokenizer, section.dtype)
        if section.attn_implementation is not None:
            base.set_attn_implementation(section.attn_implementation)
    elif adapted and key in bases:
        base = bases[key]
    else:
        quantized = section.load_in_4bit or section.load_in_8bit
        elsewhere = torch.device("meta") if receives and not quantized else None
        base = _load_base(agent, section, weights, elsewhere or places.get(_owner_key(policy, section)))
    if not adapted:
        return base
    model = _add_adapter(base, agent, policy, section)
    if section.tiny is None:
        bases[key] = model
    return model


def _add_adapter(base: PreTrainedModel | PeftModel, agent: str, policy: str, section: AgentSection) -> PeftModel:
    """Add the adapter of a policy to its base model, or to the other adapters on it."""
    if _is_part(policy, base):
        raise ConfigError(f"agents.{agent}: {policy!r} {_TAKEN}; give it another name, or set agents.{agent}.policy")
    if section.adapter is not None:
        with retold(WeightsError, lambda error: ConfigError(f"agents.{agent}.adapter: {error}"), cause=True):
            return read_adapter(base, section.adapter, policy, section.trainable)
    return add_adapter(base, policy, lora_config(section.lora or LoraSection()))


_TAKEN = "is also the name of a part of its model, and PEFT would take one for the other"


def _is_part(policy: str, base: PreTrainedModel | PeftModel) -> bool:
    """Return whether an adapter of this name would be taken for a part of its model."""
    parts = {part for name, _ in base_of(base).named_parameters() for part in name.split(".")}
    # PEFT's containers have adapters for keys, and refuse those that they have for attributes
    taken = parts | {"base_model", "base_layer"} | {*dir(nn.ModuleDict()), *dir(nn.ParameterDict())}
    return policy in taken or policy.startswith("lora_")


def on_one_base(
    model: PreTrainedModel, tokenizer: Tokenizer, agents: Sequence[str | Agent], lora: PeftConfig | None
) -> list[Agent]:
    """Return the agents with an adapter each on ``model``; see :meth:`maporl.Team.on_one_base`.

    Raises:
        ValueError: an agent brings a model or an adapter of its own, or its name is that of a part of the model.
    """
    if isinstance(agents, str):
        raise ValueError(f"agents: expected a list of names or of Agent, got {agents!r:.80}; write [{agents!r:.80}]")
    options = lora_config(LoraSection()) if lora is None else lora
    shared: Any = model
    placed = []
    for agent in (Agent(given) if isinstance(given, str) else given for given in agents):
        if not has_weights(agent.engine):
            placed.append(agent)
            continue
        if agent.model is not None or agent.adapter is not None or agent.by_turn:
            raise ValueError(f"agent {agent.name!r}: it brings a model, adapter or turns; leave them out, or use Team")
        policy = agent.policy or agent.name
        if policy not in getattr(shared, "peft_config", {}):
            if _is_part(policy, shared):
                raise ValueError(f"agent {agent.name!r}: {policy!r} {_TAKEN}; give it another name, or policy=")
            shared = add_adapter(shared, policy, deepcopy(options))
        placed.append(replace(agent, policy=policy, tokenizer=tokenizer, adapter=policy))
    return [replace(agent, model=shared) if has_weights(agent.engine) else agent for agent in placed]


def lora_config(lora: LoraSection) -> LoraConfig:
    """Return what PEFT needs to know of a new LoRA."""
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")


def _load_base(agent: str, section: AgentSection, weights: bool, place: torch.device | None) -> PreTrainedModel:
    where = f"agents.{agent}.model"
    attention = {} if section.attn_implementation is None else {"attn_implementation": section.attn_implementation}
    if not weights:
        config = _from_pretrained(AutoConfig, section.model, where)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **attention)
        with hub.asking(section.model), suppress(OSError):  # a model may have no file of its own for it
            model.generation_config = GenerationConfig.from_pretrained(str(section.model))  # it may name more stop ids
        return model
    options: dict[str, Any] = {"dtype": section.dtype, **attention}
    if section.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if section.load_in_8bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    if place is not None:
        options["device_map"] = {"": place}
    return _from_pretrained(AutoModelForCausalLM, section.model, where, read_model, **options)


def _from_pretrained(
    kind: Any, source: str | None, where: str, read: Callable[..., Any] = read_pretrained, **options: Any
) -> Any:
    try:
        return read(kind, str(source), **options)
    except WeightsError as error:
        raise ConfigError(f"{where}: {error}; expected a folder of save_pretrained, or a hub name") from error


def context_length(agent: str, section: AgentSection) -> int | None:
    """Return the context length of an agent's model, in tokens, or None if its configuration does not give one.

    Only the model's configuration is read.

    Raises:
        ConfigError: the model's configuration cannot be loaded.
    """
    if section.tiny is not None:
        return section.tiny.context
    if section.model is None:
        return None
    return context_of(_text_config(f"agents.{agent}", section.model))


def _text_config(where: str, model: str) -> Any:
    return _from_pretrained(AutoConfig, model, f"{where}.model").get_text_config()


def own_device(use_cpu: bool) -> torch.device:
    """Return the device of this process, before any library has chosen it: the CPU, or the accelerator of its rank."""
    kind = None if use_cpu else accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def split(owners: list[str], use_cpu: bool, devices: list[torch.device] | None = None) -> list[torch.device]:
    """Return a device for each base model. ``owners`` names each of them by one of its policies.

    ``devices`` are by default the accelerators of this process, or the CPU with ``use_cpu``.

    Raises:
        ValueError: the devices are fewer than the base models, or several processes were started.
    """
    if distributed.size() > 1:
        raise ValueError(
            f"placement: split gives one process several devices, and {distributed.size()} processes were started; "
            "start one, or use placement: shared, where every process has all models on its own device"
        )
    if devices is None:
        devices = (not use_cpu and accelerators()) or [torch.device("cpu")]
    if len(owners) > len(devices):
        raise ValueError(
            f"placement: split needs a device for each of {len(owners)} base models (of policies {', '.join(owners)}), "
            f"and there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({', '.join(map(str, devices))}); use "
            "placement: shared, or let agents share a base (agents.NAME.lora)"
        )
    return devices[: len(owners)]


def split_bases(policies: Mapping[str, Policy], use_cpu: bool) -> dict[int, torch.device]:
    """Return a device for every base model by the model's ``id``, in the order of the policies.

    Raises:
        ValueError: the devices are fewer than the base models, or several processes were started.
    """
    bases = {id(base_of(policy.model)): name for name, policy in reversed(list(policies.items()))}
    return dict(zip(reversed(bases), split(list(reversed(bases.values())), use_cpu), strict=True))
