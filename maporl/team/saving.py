"""Save a team, and describe its agents as a configuration does, so that another process can load them again.

A model that was loaded from a folder or from the hub is described by that name. Any other model is described by the
folder in which it is saved: one that was built here, and one whose weights were changed in memory.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftModel

from maporl.config import Config, parse_config, to_yaml
from maporl.config.algorithm import Algorithm
from maporl.config.engines import ENGINES, IN_PYTHON
from maporl.credentials import is_secret
from maporl.errors import ConfigError
from maporl.storage.run_folder import TAGS, must_be_empty
from maporl.team.agents import Agent, Policy
from trl_ext.files.atomic import new_folder, replace_file
from trl_ext.files.paths import below
from trl_ext.learning.policy import save_model
from trl_ext.models.adapters import base_state, settled
from trl_ext.models.attention import ATTENTIONS
from trl_ext.models.forward import base_of
from trl_ext.models.weights import ADAPTER_OPTIONS, has_weights_of
from trl_ext.trainer.model_card import card_text

BASE = "base"
"""The folder in an adapter's folder with the model below it, if that has no name."""
_DTYPES = ("float32", "bfloat16", "float16")
_LOGIN = re.compile(r"://[^/\s@]+@")


@dataclass
class SavedTeam:
    """The saved files of a team, and their places.

    Args:
        agents: the team's agents, by name.
        policies_of: the policies that speak for each agent that has weights, by turn.
        weights: the folder of the policies' weights, as configurations name it.
        tokenizers: the folder of the tokenizers of policies whose weights are not saved.
        everything: whether all policies are saved. Otherwise those are left out that have a name, with which they can
            be loaded again.
        options: for each agent, the options of its engine.
        only_in_python: what a configuration cannot say of the agents, by its key. :meth:`sections` fills it in.
    """

    agents: Mapping[str, Agent]
    policies_of: Mapping[str, tuple[Policy, ...]]
    weights: str
    tokenizers: str
    everything: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    only_in_python: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names: dict[int, str | None] = {}
        self._owners: dict[int, str] = {}  # the policy in whose folder a base model or a tokenizer is saved
        for name, policy in self._policies.items():
            base = base_of(policy.model)
            if id(base) not in self._names:
                self._names[id(base)] = name_of(policy)
            self._owners.setdefault(id(base), name)
            if not self._saves_weights(policy):
                self._owners.setdefault(id(policy.tokenizer), name)

    def save(self, weights: Path, tokenizers: Path) -> None:
        """Write the weights and the tokenizers into two folders. The weights must be whole (``whole_weights``)."""
        for name, policy in self._policies.items():
            if not self._saves_weights(policy):
                if self._owners[id(policy.tokenizer)] == name:
                    policy.tokenizer.save_pretrained(below(tokenizers, name))
                continue
            base = base_of(policy.model)
            # the base that is saved below an adapter is the one that its initialisation has changed already
            settles = policy.adapter is not None and self._names[id(base)] is None
            with settled(policy.model, str(policy.adapter)) if settles else nullcontext():
                policy.save(below(weights, name))
            if policy.adapter is not None and self._names[id(base)] is None and self._owners[id(base)] == name:
                save_model(base, below(weights, name) / BASE, base_state(base))

    @cached_property
    def _policies(self) -> dict[str, Policy]:
        """The policies that speak for an agent, by name. Those of past opponents are not described."""
        return {policy.name: policy for speaking in self.policies_of.values() for policy in speaking}

    def config(self, folder: str, **more: Any) -> Config:
        """Return a configuration of the team, with ``more`` sections and ``output_dir: folder``.

        Raises:
            ConfigError: an agent cannot be described, because its turns have different kinds of models or options.
        """
        values = {"output_dir": folder, "task": {}, "protocol": {}, "agents": self.sections(), **more}
        if self.only_in_python:
            key, what = next(iter(self.only_in_python.items()))
            if not key.startswith(("engines.", "training.")):
                raise ConfigError(f"{folder}: {key}: {what} cannot be described; save the models by save_pretrained")
            values["only_in_python"] = self.only_in_python
        return parse_config(values, folder)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the configuration's section of each agent."""
        return {name: self._section(agent) for name, agent in self.agents.items()}

    def _section(self, agent: Agent) -> dict[str, Any]:
        section: dict[str, Any] = {"role": agent.role, "system": agent.system} | self._engine(agent)
        if agent.name in self.policies_of:
            section |= self._model(agent.name, self.policies_of[agent.name])
        return {key: value for key, value in section.items() if value is not None}

    def _engine(self, agent: Agent) -> dict[str, Any]:
        """Return the agent's engine and its options. An engine that was passed in Python has no name."""
        options, entry = self.options.get(agent.name), ENGINES.get(agent.engine)
        if entry is None or (entry.section is not None and options is None):
            if agent.name in self.policies_of:  # it can speak without its engine
                self.only_in_python[f"training.engines.{agent.name}"] = f"engine {agent.engine!r}"
                return {"engine": "transformers"}
            self.only_in_python[f"engines.{agent.name}"] = f"engine {agent.engine!r}"
            return {"engine": IN_PYTHON}
        settings: Any = options or {}
        plain = self._without_secrets(asdict(settings) if is_dataclass(settings) else settings, agent.name)  # type: ignore[arg-type]  # an instance
        return {"engine": agent.engine, entry.section or "engine_options": plain or None}

    def _without_secrets(self, options: Mapping[str, Any], agent: str) -> dict[str, Any]:
        """Return an engine's options without what looks like a key or a password. A program passes these again."""
        public: dict[str, Any] = {}
        for key, value in options.items():
            if isinstance(value, Mapping):
                public[key] = self._without_secrets(value, agent)
                continue
            addresses = value if isinstance(value, list) else [value]
            if value and (
                is_secret(key, value) or any(isinstance(one, str) and _LOGIN.search(one) for one in addresses)
            ):
                self.only_in_python[f"engines.{agent}.{key}"] = "a secret"
            else:
                public[key] = value
        return public

    def _model(self, agent: str, policies: tuple[Policy, ...]) -> dict[str, Any]:
        """Return what the section says of the weights that speak for an agent."""
        first, names = policies[0], [policy.name for policy in policies]
        if any(_options(policy) != _options(first) for policy in policies[1:]):
            self.only_in_python[f"agents.{agent}.by_turn"] = (
                f"policies {', '.join(names)} of different models or options"
            )
        base = base_of(first.model)
        at = f"{self.weights}/{first.name}"
        if first.adapter is not None:
            named: str | None = self._names[id(base)] or f"{self.weights}/{self._owners[id(base)]}/{BASE}"
        else:
            named = at if self._saves_weights(first) else self._names[id(base)]
        dtype = str(base.dtype).removeprefix("torch.")
        turns: dict[str, Any] = {"policy_per": names} if len(policies) > 1 else {}
        return turns | _quantized(first) | {
            "model": named,
            "adapter": at if first.adapter is not None else None,
            "tokenizer": at if self._saves_weights(first) else f"{self.tokenizers}/{self._owners[id(first.tokenizer)]}",
            "policy": first.name if not turns and first.name != agent else None,
            "dtype": dtype if dtype in _DTYPES else None,
            "attn_implementation": _attention(base),
            "trainable": first.trainable,
            "learning_rate": first.algorithm.learning_rate,
            "critic": first.algorithm.critic,
            "algorithm": _algorithm(first.algorithm, self.agents[agent].learns_by),
        }  # fmt: skip

    def _saves_weights(self, policy: Policy) -> bool:
        return self.everything or policy.adapter is not None or self._names[id(base_of(policy.model))] is None


def save_team(agents: Mapping[str, Agent], policies_of: Mapping[str, tuple[Policy, ...]], folder: Path) -> None:
    """Save a team's agents and their policies in ``folder`` (:meth:`maporl.Team.save`).

    Raises:
        RunExists: the folder is not empty.
        ConfigError: an agent cannot be described.
    """
    must_be_empty(folder)
    saved = SavedTeam(agents, policies_of, str(folder), str(folder))
    config = saved.config(str(folder))
    with new_folder(folder) as partial:
        saved.save(partial, partial)
        replace_file(partial / "config.yaml", to_yaml(config))


def name_of(policy: Policy) -> str | None:
    """Return the folder or the hub's name that has the weights of the policy's base model, or None.

    The name that transformers keeps is not enough: a model that was built from a configuration has the name of the
    configuration, and weights may have been changed in memory. So some rows of every tensor are compared with the
    files. Quantised weights cannot be compared, and keep their name. A model that only a saved team has, below its
    adapters, counts as without a name, so that no team depends on the folder of another one.
    """
    base = base_of(policy.model)
    name = base.config._name_or_path
    if (Path(name).parent / ADAPTER_OPTIONS).is_file():
        return None
    if not name or not (policy.is_quantized or has_weights_of(base, name)):
        return None
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _algorithm(policy: Algorithm, agent: Algorithm) -> dict[str, Any]:
    """Return what a policy learns by, and the advantage of the agent, without the keys of the agent's own section."""
    values = asdict(replace(policy, advantage=agent.advantage, critic=None, learning_rate=None))
    return {key: value for key, value in values.items() if value not in (None, {})}


def _quantized(policy: Policy) -> dict[str, bool]:
    if not policy.is_quantized:
        return {}
    options = base_of(policy.model).config.quantization_config
    return {key: True for key in ("load_in_4bit", "load_in_8bit") if getattr(options, key, False)}


def _attention(base: Any) -> str | None:
    """Return the attention implementation of a model, or None if it is what transformers chooses by itself."""
    attention = base.config._attn_implementation
    return attention if attention in ATTENTIONS and attention != ("sdpa" if base._supports_sdpa else "eager") else None


def _options(policy: Policy) -> dict[str, Any]:
    """Return what all policies of one agent must have in common, because its section says it once."""
    adapter = None
    if isinstance(policy.model, PeftModel):
        adapter = {
            k: v for k, v in policy.model.peft_config[str(policy.adapter)].to_dict().items() if k != "inference_mode"
        }
    return {
        "base": id(base_of(policy.model)) if adapter else base_of(policy.model).config.to_dict(),
        "adapter": adapter,
        "attention": _attention(base_of(policy.model)),
        "trainable": policy.trainable,
        "algorithm": policy.algorithm.of_policy,
    }


_BODY = """
# {name}

One policy of a team of language models ({team}) trained together with
`maporl` by reinforcement learning on {protocol} dialogues about the task `{task}`.
It speaks for: {agents}.

- kind: {kind}
- updates: {updates}, dialogues: {dialogues}
- {learned}, clip range {cliprange}
- {audit}

```python
{loading}
```

`critic/`, where present, is the critic; it is needed only to go on training.

## Citation

MAPoRL: Park et al., *MAPoRL: Multi-Agent Post-Co-Training for Collaborative Large Language Models with Reinforcement
Learning*, ACL 2025, arXiv:2502.18439.
"""


def write_model_card(folder: Path, policy: Policy, **facts: Any) -> None:
    """Write the model card of ``policy`` to ``folder/README.md``. ``facts`` are what it says of the training."""
    base = policy.model.config._name_or_path
    if policy.adapter is not None:
        kind = f"adapter on `{base}`" if base else "adapter on a model that has no name"
        below = f'AutoModelForCausalLM.from_pretrained("{base}")' if base else "...  # the run's initial/NAME/base"
        loading = f'base = {below}\nmodel = PeftModel.from_pretrained(base, "{policy.name}")'
    else:
        kind = f"full model, `{type(policy.model).__name__}`"
        loading = f'model = AutoModelForCausalLM.from_pretrained("{policy.name}")'
    body = _BODY.format(name=policy.name, agents=", ".join(policy.agents), kind=kind, loading=loading, **facts)
    library = "peft" if policy.adapter is not None else "transformers"
    card = card_text(body, library_name=library, base_model=base or None, tags=TAGS)
    ModelCard(card).save(folder / "README.md")
