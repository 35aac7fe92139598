"""Agents and the team: whose weights speak for whom. Agents are not policies: several agents may share one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from jinja2 import TemplateError
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from maporl.config import Config, ConfigError
from maporl.sections import WITH_WEIGHTS, AgentSection, LoraSection
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.chat import FALLBACK_TEMPLATE, Tokenizer, check_tokenizer, encode_prompt
from trl_ext.forward import base_of
from trl_ext.generation import stop_ids_of
from trl_ext.learner import Learner, starting_point
from trl_ext.ppov2_config import PPOv2Config


class PromptTooLong(ValueError):
    """A prompt and its answer cannot fit the model's context."""


@dataclass
class Agent:
    """One seat at the table.

    ``model`` and ``tokenizer`` are needed if ``engine`` is "transformers"; ``adapter`` names the adapter of a
    ``PeftModel`` (which agents may share). ``policy`` names the weights: by default each agent has its own; agents that
    name the same policy share it, and then the first one's model, tokenizer and options count.

    ``by_turn``: other weights at every turn: entries that stand for this agent in its first turn, its second, ..., the
    last one in all later turns too. Their names are the policies'; they need one tokenizer, because they continue one
    conversation.
    """

    name: str
    model: PreTrainedModel | PeftModel | None = None
    tokenizer: Tokenizer | None = None
    policy: str | None = None
    adapter: str | None = None
    role: str | None = None
    system: str | None = None
    trainable: bool = True
    learning_rate: float | None = None
    critic: str | None = None
    engine: str = "transformers"
    by_turn: tuple["Agent", ...] = ()


@dataclass
class Policy:
    """Weights that speak: a model (perhaps one adapter of a shared base), its tokenizer and what ends its answers."""

    name: str
    model: PreTrainedModel | PeftModel
    tokenizer: Tokenizer
    adapter: str | None
    trainable: bool
    learning_rate: float | None
    critic: str | None
    stop_ids: frozenset[int] = frozenset()
    agents: list[str] = field(default_factory=list)

    @cached_property
    def digits(self) -> frozenset[int]:
        """Token ids that are nothing but digits."""
        tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return frozenset(i for i, t in enumerate(tokens) if t is not None and t.lstrip("\u0120\u2581 ").isdigit())

    @contextmanager
    def active(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model with this policy's adapter switched on."""
        if self.adapter is not None and self.model.active_adapters != [self.adapter]:
            self.model.set_adapter(self.adapter)
        yield base_of(self.model)

    def check_length(self, prompt: int, new: int, label: str) -> None:
        """Raise if a prompt and its answer cannot fit the model's context."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and prompt + new > context:
            raise PromptTooLong(
                f"{label}: the prompt has {prompt} tokens and the answer may have {new}, but policy {self.name!r} reads "
                f"at most {context}; shorten the prompt, lower ppo.response_length or protocol.turns, or use another model"
            )


class Team:
    """Agents by name, in speaking order, and the policies behind them."""

    def __init__(self, agents: list[Agent]):
        names = [a.name for a in agents]
        if not agents or len(set(names)) != len(names):
            raise ValueError(f"a team needs agents with different names, got {names}")
        self.agents = {a.name: a for a in agents}
        self.policies: dict[str, Policy] = {}
        self.voices: dict[str, tuple[Policy, ...]] = {}
        for agent in agents:
            if agent.engine in WITH_WEIGHTS:
                voices = [self._policy(entry) for entry in agent.by_turn or (agent,)]
                if any(v.tokenizer is not voices[0].tokenizer for v in voices):
                    raise ValueError(f"agent {agent.name!r}: by_turn: its turns continue one conversation; give every "
                                     "entry the very same tokenizer object")  # fmt: skip
                for voice in dict.fromkeys(v.name for v in voices):
                    self.policies[voice].agents.append(agent.name)
                self.voices[agent.name] = tuple(voices)

    def _policy(self, agent: Agent) -> Policy:
        """The policy of an agent, or of one of its turns; made on first sight."""
        name = agent.policy or agent.name
        if name in self.policies:
            return self.policies[name]
        if agent.model is None or agent.tokenizer is None:
            raise ValueError(f"agent {agent.name!r}: pass a model and its tokenizer, or engine='human'")
        check_tokenizer(agent.tokenizer, f"agent {agent.name!r}")
        adapter = agent.adapter
        if isinstance(agent.model, PeftModel):
            adapter = adapter or agent.model.active_adapter
            if adapter not in agent.model.peft_config:
                raise ValueError(
                    f"agent {agent.name!r}: no adapter {adapter!r}; the model has {list(agent.model.peft_config)}"
                )
        for other in self.policies.values():
            if other.model is agent.model and other.adapter == adapter:
                raise ValueError(
                    f"policies {other.name!r} and {name!r} bring the same weights; give their agents one "
                    "policy name to share them, or a model (or adapter) each"
                )
        policy = Policy(name, agent.model, agent.tokenizer, adapter, agent.trainable, agent.learning_rate, agent.critic)
        self.policies[name] = policy
        return policy

    def names(self) -> tuple[str, ...]:
        """Agents in speaking order."""
        return tuple(self.agents)

    def find_stop_ids(self, args: PPOv2Config) -> None:
        """Settle what ends an answer, for every policy."""
        for policy in self.policies.values():
            policy.stop_ids = stop_ids_of(base_of(policy.model), policy.tokenizer, args.stop_token, args.stop_token_id)

    def build_learners(self, args: PPOv2Config, outputs: int, critics: bool = True) -> dict[str, Learner]:
        """One learner for each trainable policy; ``outputs`` values per critic (one per turn), or no critics."""
        learners = {
            policy.name: Learner(
                policy.name,
                policy.model,
                policy.tokenizer,
                args,
                critic=(policy.critic or args.critic) if critics else "none",
                adapter=policy.adapter,
                ref_adapter=starting_point(policy.model, policy.adapter) if policy.adapter and args.kl_coef else None,
                outputs=outputs,
                learning_rate=policy.learning_rate,
            )
            for policy in self.policies.values()
            if policy.trainable
        }
        if not learners:
            raise ValueError("no policy of the team is trainable; set trainable=True for at least one agent")
        return learners

    def count_parameters(self) -> dict[str, tuple[int, int]]:
        """(all, of its own adapter or trainable) parameters by policy."""
        counts = {}
        for policy in self.policies.values():
            own = [
                p for n, p in policy.model.named_parameters() if policy.adapter is None or f".{policy.adapter}." in n
            ]
            everything = sum(p.numel() for p in base_of(policy.model).parameters())
            counts[policy.name] = (everything, sum(p.numel() for p in own) if policy.trainable else 0)
        return counts

    @classmethod
    def from_config(cls, config: Config, weights: bool = True) -> "Team":
        """Load (or build) every tokenizer, check them all, and only then the models; one base per model name.

        ``weights=False`` builds the models on the meta device, from their configurations alone: for counting.
        """
        tokenizers = load_tokenizers(config)
        if not weights:
            with torch.device("meta"):
                return cls._load(config, tokenizers, weights)
        return cls._load(config, tokenizers, weights)

    @classmethod
    def from_pretrained(cls, name: str | Path, overrides: Sequence[str] = ()) -> "Team":
        """The trained team of a run's folder, or of a hub repository that ``maporl push`` made, for evaluation or further training.

        ``overrides`` are ``KEY=VALUE`` as on the command line: ``["agents.ann.model=org/base"]`` where an adapter's base has moved.
        """
        from maporl.pretrained import load_team  # it needs this module

        return load_team(name, overrides)

    @classmethod
    def _load(cls, config: Config, tokenizers: dict[str, Tokenizer], weights: bool) -> "Team":
        bases: dict[tuple, PeftModel] = {}
        loaded: dict[str, Agent] = {}
        agents: list[Agent] = []
        for name, section in config.agents.items():
            options: dict[str, Any] = {k: getattr(section, k) for k in ("trainable", "learning_rate", "critic")}
            seat: dict[str, Any] = {k: getattr(section, k) for k in ("role", "system", "engine")}
            if section.engine not in WITH_WEIGHTS:
                agents.append(Agent(name, **seat))
                continue
            for policy in (names := policies_of(name, section, config.turns())):
                if policy not in loaded:
                    model = _load_policy(name, policy, section, tokenizers[name], bases, weights)
                    adapter = policy if isinstance(model, PeftModel) else None
                    loaded[policy] = Agent(policy, model, tokenizers[name], adapter=adapter, **options)
            if len(names) > 1:
                agents.append(Agent(name, by_turn=tuple(loaded[policy] for policy in names), **seat))
            else:
                agents.append(replace(loaded[names[0]], name=name, policy=names[0], **seat))
        return cls(agents)


def policies_of(agent: str, section: AgentSection, turns: int) -> tuple[str, ...]:
    """The policies that speak for an agent, by turn; the last one for all later turns too."""
    policy = section.policy or agent
    if section.policy_per == "turn":
        return tuple(f"{policy}-turn{turn}" for turn in range(1, turns + 1))
    return (f"{policy}-first", f"{policy}-rest") if section.policy_per == "first_and_rest" else (policy,)


# -- loading ------------------------------------------------------------------------------------------------------


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """Every agent's tokenizer, checked; no model is loaded."""
    tokenizers = {}
    for name, section in config.agents.items():
        if section.engine not in WITH_WEIGHTS:
            continue
        if section.tiny is not None:
            tokenizer = build_tiny_tokenizer(section.tiny)
        else:
            source = section.tokenizer or section.model
            tokenizer = _from_pretrained(
                AutoTokenizer, source, f"agents.{name}.{'tokenizer' if section.tokenizer else 'model'}"
            )
        if section.chat_template is not None:
            tokenizer.chat_template = _chat_template(section.chat_template, f"agents.{name}.chat_template")
        if section.pad_token is not None:
            tokenizer.pad_token = section.pad_token
        _check_for_config(name, section, tokenizer)
        tokenizers[name] = tokenizer
    return tokenizers


def _check_for_config(name: str, section: AgentSection, tokenizer: Tokenizer) -> None:
    where = f"agents.{name}"
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{where}: its tokenizer has no EOS token, so an answer could never end; use another tokenizer"
        )
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"{where}: its tokenizer has no padding token; set {where}.pad_token: {tokenizer.eos_token!r}"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{where}: its tokenizer has no chat template (a base model?); set {where}.chat_template: fallback for plain "
            "'User:' and 'Assistant:' paragraphs, or the path of a Jinja file"
        )
    _check_vocabulary(where, section, tokenizer)


def _check_vocabulary(where: str, section: AgentSection, tokenizer: Tokenizer) -> None:
    """The template renders a short chat, and the model knows every id that this and ordinary text may hold.

    Tokens added beyond the model's vocabulary that no text leads to do no harm, and some tokenizers have them.
    """
    messages = [{"role": "system", "content": "."}] if section.system else []
    messages += [{"role": role, "content": "."} for role in ("user", "assistant", "user")]
    try:
        ids = encode_prompt(tokenizer, messages)
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: its chat template cannot render {', '.join(m['role'] for m in messages)} messages "
            f"({type(error).__name__}: {' '.join(str(error).split())}); mend the template, or set {where}.chat_template"
        ) from None
    size = None if section.model is None else getattr(_text_config(where, section.model), "vocab_size", None)
    highest = max(*ids, tokenizer.vocab_size - 1, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if size is not None and highest >= size:
        raise ConfigError(
            f"{where}: its tokenizer uses ids up to {highest}, but model {section.model!r} knows {size} tokens only; use "
            "the model's own tokenizer"
        )


def _chat_template(value: str, where: str) -> str:
    """``fallback``, a template's text, or a file: what ends in .jinja or has no brace must be one."""
    if value == "fallback":
        return FALLBACK_TEMPLATE
    if "{" in value and not value.endswith(".jinja"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: {value!r:.80} is no readable file ({type(error).__name__}); expected 'fallback', a Jinja file, or "
            "the text of a template"
        ) from None


def _load_policy(
    agent: str, policy: str, section: AgentSection, tokenizer: Tokenizer, bases: dict[tuple, PeftModel], weights: bool
) -> PreTrainedModel | PeftModel:
    """The model of a policy; policies with a LoRA on the same model and dtype share its base."""
    key = (section.model, section.dtype, section.load_in_4bit, section.load_in_8bit)
    if section.tiny is None and key in bases and (section.lora or section.adapter):
        return _add_adapter(bases[key], policy, section)
    base = build_tiny_model(section.tiny, tokenizer) if section.tiny else _load_base(agent, section, weights)
    if section.lora is None and section.adapter is None:
        return base
    model = _first_adapter(base, policy, section)
    if section.tiny is None:
        bases[key] = model
    return model


def _first_adapter(model: PreTrainedModel, policy: str, section: AgentSection) -> PeftModel:
    if section.adapter is not None:
        return PeftModel.from_pretrained(model, section.adapter, adapter_name=policy, is_trainable=section.trainable)
    return get_peft_model(model, _lora_config(section), adapter_name=policy)


def _add_adapter(model: PeftModel, policy: str, section: AgentSection) -> PeftModel:
    if section.adapter is not None:
        model.load_adapter(section.adapter, adapter_name=policy, is_trainable=section.trainable)
    else:
        model.add_adapter(policy, _lora_config(section))
    return model


def _lora_config(section: AgentSection) -> LoraConfig:
    lora = section.lora or LoraSection()
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")


def _load_base(agent: str, section: AgentSection, weights: bool) -> PreTrainedModel:
    if not weights:
        return AutoModelForCausalLM.from_config(_from_pretrained(AutoConfig, section.model, f"agents.{agent}.model"))
    options: dict[str, Any] = {"dtype": section.dtype}
    if section.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if section.load_in_8bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return _from_pretrained(AutoModelForCausalLM, section.model, f"agents.{agent}.model", **options)


_OFFLINE = " that is in the cache: HF_HUB_OFFLINE is set, so nothing is downloaded"


def _from_pretrained(kind: Any, source: str | None, where: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:  # ImportError: bitsandbytes is not installed
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{where}: {source!r} could not be loaded as {kind.__name__} ({first_line}); give a folder saved by "
            f"save_pretrained, or the hub name of a causal language model{_OFFLINE if constants.HF_HUB_OFFLINE else ''}"
        ) from error


def context_length(agent: str, section: AgentSection) -> int | None:
    """The context of an agent's model, from its configuration alone."""
    if section.tiny is not None:
        return section.tiny.context
    if section.model is None:
        return None
    return getattr(_text_config(f"agents.{agent}", section.model), "max_position_embeddings", None)


def _text_config(where: str, model: str) -> Any:
    return _from_pretrained(AutoConfig, model, f"{where}.model").get_text_config()
