"""The models of a trained team: one for each agent that has weights, or for each turn of one with several. What is
wrong is said before anything is written."""

import copy
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import safe_open
from transformers.utils import cached_file

from maporl.config.schema import AgentSection, Config
from maporl.errors import ConfigError, Fault, RunError, refuse
from maporl.integrations.exporting.template import Engine, with_system
from maporl.rollout.agent_tools import tools_of_team
from maporl.rollout.requests import opening
from maporl.run import ResolvedRun
from maporl.storage.run_folder import INITIAL, weights_of
from maporl.team.agents import Policy
from maporl.team.saved import read_team
from maporl.team.team import Team
from maporl.team.weights import has_weights
from trl_ext.chat.encoding import Tokenizer, encode_prompt
from trl_ext.errors import retold
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.files.manifest import verify
from trl_ext.files.paths import below
from trl_ext.models.adapters import KEEPS_BASE
from trl_ext.models.weights import ADAPTER_WEIGHTS
from trl_ext.sampling.request import Draw
from trl_ext.sharding.shards import SHARDS

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can make room (``--max-lora-rank``)."""
EMBEDS = "an adapter changes the embeddings, which only maporl api serves"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "."}]
SERVED = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "layers_to_transform", "layers_pattern", "runtime_config", "init_lora_weights", "eva_config",
}  # fmt: skip
"""The options of a LoRA that may have any value: those that vLLM reads, and those that change nothing after training.
vLLM refuses some of the others, and older versions did not read some."""


@dataclass(frozen=True)
class Model:
    """A model of an export.

    Args:
        name: its name: that of the agent, or of one of its turns.
        agent: the agent.
        policy: its weights, on the meta device.
        section: the agent's section of the configuration.
        weights: the folder of its weights, or the folder or the hub's name of its adapter. None: they are those of
            ``base``.
        base: the model below its adapter, or what it is itself if it has no weights of its own: a folder, a name on the
            hub, or None for a tiny model that is built.
        tokenizer: its tokenizer, whose chat template puts ``system`` before each conversation.
        template: the chat template without that.
        system: the system prompt.
        draw: how evaluations draw its answers.
    """

    name: str
    agent: str
    policy: Policy
    section: AgentSection
    weights: str | None
    base: str | None
    tokenizer: Tokenizer
    template: str
    system: str | None
    draw: Draw

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter of ``base``."""
        return self.policy.adapter is not None

    def has_own(self, merge: bool) -> bool:
        """Return whether whole weights of its own are written: not if it is a base as it is."""
        return merge if self.is_adapter else self.weights is not None or self.base is None

    @property
    def options(self) -> Any:
        """Return the options of its adapter."""
        return self.policy.model.peft_config[self.policy.adapter]


def models_of(source: str, engine: Engine, merge: bool) -> tuple[Config, list[Model], list[str]]:
    """Return the configuration of a team, its models, and notes on what is not among them.

    Args:
        source: a run's folder, a folder of weights in it (``checkpoint-N`` or ``final``), or a team on the hub.
        engine: what will serve it.
        merge: whether adapters are merged into their bases.

    Raises:
        ConfigError: something of it cannot be served.
        RunError: the team does not exist, or it has no weights.
        CheckpointError: a checkpoint is damaged.
    """
    config, root, initial = _read(source)
    with retold(NotImplementedError, lambda _: ConfigError(f"{source}: {EMBEDS}")):  # the base's weights are not here
        team = Team.from_config(config, weights=False)
    team.find_stop_ids(config.ppo)
    systems, notes = _systems(config, team)
    models: list[Model] = []
    for agent, section in config.agents.items():
        if agent not in team.policies_of:
            notes.append(f"Left out: {agent} ({section.engine}), which has no weights here")
            continue
        policies, system = team.policies_of[agent], systems[agent]
        sampling = team.sampling(ResolvedRun(config).sampling).of(agent, training=False)
        for turn, policy in enumerate(policies):
            decoding = config.evaluation.decoding
            drawn = sampling.at(None, section.role, turn, decoding)
            draw = policy.voice.draw(drawn, decoding, config.ppo.response_length)
            name = agent if len(policies) == 1 else f"{agent}-turn{turn + 1}"
            weights = _weights(section, policy, root, initial)
            tokenizer, template = copy.copy(policy.tokenizer), policy.tokenizer.get_chat_template()
            tokenizer.chat_template = with_system(template, system)
            models.append(
                Model(name, agent, policy, section, weights, section.model, tokenizer, template, system, draw)
            )
        if len(policies) > 1:
            notes.append(f"{agent} has a model for each turn; {agent}-turn{len(policies)} is for all later ones too")
    if not models:
        raise ConfigError(f"{source}: no agent of the team has weights here, so there is nothing to serve")
    refuse(_faults(models, engine, merge))
    return config, models, notes


def _read(source: str) -> tuple[Config, Path, Path]:
    """Return a team's configuration, the folder of its policies, and that of the weights with which the run began."""
    given = Path(source)
    if given.is_dir() and not (given / "config.yaml").is_file() and (given.parent / "config.yaml").is_file():
        config, folder = read_team(given.parent)
        if (given / "policies").is_dir():
            verify(given)
        return config, given / "policies" if (given / "policies").is_dir() else given, folder / INITIAL
    config, folder = read_team(source)
    return config, weights_of(folder), folder / INITIAL


def _weights(section: AgentSection, policy: Policy, root: Path, initial: Path) -> str | None:
    """Return the place of the weights with which ``maporl eval`` lets a policy speak, or None: those of its model."""
    if section.trainable:
        folder = below(root, policy.name)
        if has_weights(folder) or (folder / SHARDS).is_dir():
            return str(folder)
        saved = list_checkpoints(root)
        hint = f"; the run has not ended: give a checkpoint, such as {saved[-1]}" if saved else ""
        raise RunError(f"{root}: has no weights of policy {policy.name!r}{hint}")
    if has_weights(began := below(initial, policy.name)):
        return str(began)
    return section.adapter


def _systems(config: Config, team: Team) -> tuple[dict[str, str | None], list[str]]:
    """Return what training put before each agent's conversations, and notes on tools."""
    notes: list[str] = []
    systems = {name: section.system for name, section in config.agents.items()}
    if not config.protocol:  # a team that was saved without one
        return systems, notes
    run = ResolvedRun(config)
    tools = run.open_tools()
    with closing(tools.world):
        called = tools_of_team(tools, team, config.ppo.response_length, run.protocol, run.speakers)
    for name, offered in called.items():
        form = offered.format
        systems[name] = "\n\n".join(part for part in (systems[name], form.intro()) if part)
        how = "in each request (tools)" if form.schemas() else "by reading the calls in the answers"
        notes.append(f"{name} calls {', '.join(form.tools)}: the client offers and carries them out, {how}")
    return systems, notes


def _faults(models: list[Model], engine: Engine, merge: bool) -> Iterator[Fault]:
    """Yield what ``engine`` cannot serve."""
    names = [model.name for model in models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Fault(f"agents.{name}", "two models would have this name", "rename the agent")
    for model in models:
        key, section = f"agents.{model.agent}", model.section
        if section.load_in_4bit or section.load_in_8bit:
            bits = "load_in_4bit" if section.load_in_4bit else "load_in_8bit"
            what = "its weights are quantised when they are loaded, and elsewhere they would be others"
            yield Fault(f"{key}.{bits}", what, "serve the run with maporl api")
        if encode_prompt(model.policy.tokenizer, opening(model.system, ASKED)) != encode_prompt(model.tokenizer, ASKED):
            what = "its chat template would put it otherwise than training did; perhaps it spells a control token"
            yield Fault(f"{key}.system", what, "serve the run with maporl api")
        if model.is_adapter and engine == "vllm" and not merge and (why := _not_lora(model)):
            remedy = "give --merge, which writes whole models, or serve the run with maporl api"
            yield Fault(key, f"vLLM cannot serve the adapter of {model.name}: {why}", remedy)
        if model.draw.grammar is not None and engine == "transformers":
            what = "answers are held to a structured output, and transformers holds none to anything"
            yield Fault(f"{key}.sampling.structured_output", what, "export for vllm, or serve the run with maporl api")


def _not_lora(model: Model) -> str | None:
    """Return why vLLM cannot serve an adapter, or None: it is two matrices of linear layers."""
    options = model.options
    if type(options) is not LoraConfig:
        return f"it is a {type(options).__name__}, and vLLM serves LoRA alone"
    defaults = LoraConfig()
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in SERVED and value and value != getattr(defaults, field.name):
            return f"its LoraConfig has {field.name}={value!r:.60}"
    if options.init_lora_weights not in KEEPS_BASE:
        return f"its initialisation ({options.init_lora_weights}) has changed the base"
    if options.r > RANKS[-1]:
        return f"its rank is {options.r}, and vLLM serves up to {RANKS[-1]}"
    with safe_open(str(cached_file(str(model.weights), ADAPTER_WEIGHTS)), "pt") as tensors:
        others = sorted(name for name in tensors.keys() if not name.endswith((".lora_A.weight", ".lora_B.weight")))  # noqa: SIM118
    return f"it has the tensor {others[0]}, and vLLM serves matrices of linear layers" if others else None


def groups_of(models: list[Model], merge: bool) -> list[list[Model]]:
    """Return the models that one server can have: adapters of one base, the base, and models of the same weights.

    They have one tokenizer and one chat template without the system prompt.
    """
    groups: dict[Any, list[Model]] = {}
    for model in models:
        own = model.policy.name if model.has_own(merge) or model.base is None else None
        words = frozenset(model.tokenizer.get_vocab().items())
        key = (own, model.base, model.section.dtype, words, model.template)
        groups.setdefault(key, []).append(model)
    return list(groups.values())
