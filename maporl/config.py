"""Configuration: YAML plus dotted overrides -> one frozen dataclass, checked before anything heavy is loaded. No torch.

The dataclasses *are* the schema: names, types, defaults and limits are declared here once (PPO's own options in
:mod:`trl_ext.ppo_options`), and ``configs/ppo/base.yaml`` shows them all with a comment above each.
"""

import dataclasses
import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

from maporl.schedules import Freeze, Schedule, Span
from trl_ext.ppo_options import PPOOptions

STRICT = ConfigDict(extra="forbid")
for _plain in (PPOOptions, Schedule, Span, Freeze):
    setattr(_plain, "__pydantic_config__", STRICT)  # noqa: B010  # plain dataclasses, declared where they are used

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def _off(value: Any) -> Any:
    """YAML reads a bare ``off`` as false."""
    return "off" if value is False else value


class ConfigError(ValueError):
    """A configuration that cannot run: says what, where, what was got, what was expected, and what to do."""


@dataclass(frozen=True, config=STRICT)
class LoraSection:
    """A LoRA adapter of its own for a policy, on a base that policies of the same model share."""

    r: Positive = 16
    alpha: Positive = 32
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True, config=STRICT)
class TinySection:
    """A small character-level model built on the spot, for trying things out without any download."""

    architecture: Literal["llama", "gpt_neox", "qwen3"] = "llama"
    alphabet: str = "0123456789+*= :;?ab"
    hidden_size: Positive = 128
    layers: Positive = 3
    heads: Positive = 4
    context: Positive = 128


@dataclass(frozen=True, config=STRICT)
class AgentSection:
    """One agent: whose weights speak for it, and how they are trained."""

    model: str | None = None
    tiny: TinySection | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    pad_token: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    lora: LoraSection | None = None
    adapter: str | None = None
    load_in_4bit: bool = False
    policy: str | None = None
    policy_per: Literal["agent", "turn", "first_and_rest"] = "agent"
    role: str | None = None
    system: str | None = None
    trainable: bool = True
    learning_rate: NotNegative | None = None
    critic: Literal["head", "adapter", "model", "none"] | None = None
    engine: Literal["transformers", "human"] = "transformers"


@dataclass(frozen=True, config=STRICT)
class BonusSection:
    """The incentives to collaborate (``maporl.rewards.shaping.collaboration_bonus``)."""

    alpha: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=4, max_length=4)]
    mode: Literal["paper", "upstream"] = "paper"
    right: Share = 0.5
    wrong: Share = 0.5


@dataclass(frozen=True, config=STRICT)
class PenaltySection:
    """What answers cost their author that are no answers (``maporl.rewards.penalties``); 0 switches one off.

    ``mode="subtract"`` takes the amount off the author's credit alone; ``replace`` puts minus the amount in place of
    the score before it is shared, as the published MAPoRL code did (with 10).
    """

    too_short: NotNegative = 0.1
    min_tokens: Annotated[int, Field(ge=0)] = 0
    no_final_answer: NotNegative = 0.1
    repetition: NotNegative = 0.1
    no_eos: NotNegative = 0.1
    mode: Literal["subtract", "replace"] = "subtract"


@dataclass(frozen=True, config=STRICT)
class VerifierSection:
    """A learned verifier: a sequence classifier with one output, whose sigmoid is the score."""

    model: str
    batch_size: Positive = 16


@dataclass(frozen=True, config=STRICT)
class RewardSection:
    """Where scores come from and how an utterance is credited with later ones (``maporl.rewards.shaping``)."""

    sources: dict[str, float] = dataclasses.field(default_factory=lambda: {"label": 1.0})
    horizon: Literal["current", "last", "discounted_sum"] = "discounted_sum"
    share: Literal["individual", "all"] = "all"
    discount: NotNegative = 0.3
    verifier: VerifierSection | None = None
    bonus: BonusSection | None = None
    penalties: PenaltySection | None = None


@dataclass(frozen=True, config=STRICT)
class TrainingSection:
    """How learning is run; the names are those of ``transformers.TrainingArguments``, counted in updates."""

    learning_rate: NotNegative = 1e-5
    value_learning_rate: NotNegative | None = None
    per_device_train_batch_size: Positive = 8
    gradient_accumulation_steps: Positive = 4
    lr_scheduler_type: str = "linear"
    warmup_steps: NotNegative = 0
    max_grad_norm: NotNegative = 1.0
    weight_decay: NotNegative = 0.0
    adam_beta2: Share = 0.999
    gradient_checkpointing: bool = False
    bf16: bool = False
    use_cpu: bool = False
    save_steps: Annotated[int, Field(ge=0)] = 0
    save_total_limit: Positive | None = None
    eval_steps: Annotated[int, Field(ge=0)] = 0
    report_to: list[str] = dataclasses.field(default_factory=list)
    critic: Literal["head", "adapter", "model", "none"] = "head"
    critic_per_turn: bool = True
    critic_context: Literal["dialogue", "answer", "joint"] = "dialogue"
    detach_critic: bool = False


@dataclass(frozen=True, config=STRICT)
class WarmStartSection:
    """Brief supervised training before PPO, on dialogues played by an imperfect oracle: for tiny models."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Positive = 64
    learning_rate: NotNegative = 1e-3
    wrong: Share = 0.3


@dataclass(frozen=True, config=STRICT)
class EvaluationSection:
    """Evaluation before, after, and every ``training.eval_steps`` updates."""

    questions: Annotated[int, Field(ge=0)] = 256
    temperature: NotNegative = 0.0


@dataclass(frozen=True, config=STRICT)
class Config:
    """One run."""

    output_dir: str
    task: dict[str, Any]
    agents: Annotated[dict[str, AgentSection], Field(min_length=1)]
    protocol: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "debate"})
    seed: Annotated[int, Field(ge=0)] = 0
    updates: Positive = 100
    reward: RewardSection = dataclasses.field(default_factory=RewardSection)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    restate: Annotated[Literal["off", "base_model"], BeforeValidator(_off)] = "off"
    ppo: PPOOptions = dataclasses.field(default_factory=PPOOptions)
    training: TrainingSection = dataclasses.field(default_factory=TrainingSection)
    warm_start: WarmStartSection = dataclasses.field(default_factory=WarmStartSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)
    dialogues_logged: Annotated[int, Field(ge=0)] = 4

    def questions_per_update(self) -> int:
        """Dialogues that one update plays."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps

    def turns(self) -> int:
        """Turns of the protocol, where it counts them; else 1."""
        from maporl.protocols import build_protocol

        return getattr(build_protocol(self.protocol, tuple(self.agents)), "turns", 1)


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read ``path``, apply ``a.b=c`` overrides (values are YAML), merge agent defaults, check, and return a Config.

    Two keys serve the file itself: ``extends`` names another file whose values this one overlays, and
    ``agent_defaults`` is merged into every agent.
    """
    return from_dict(_apply(read_yaml(Path(path)), overrides or []), str(path))


def from_dict(values: dict[str, Any], where: str = "configuration") -> Config:
    """A checked Config from plain values (see :func:`load`)."""
    values = dict(values)
    defaults = values.pop("agent_defaults", None) or {}
    agents = values.get("agents")
    if isinstance(agents, dict) and isinstance(defaults, dict):
        values["agents"] = {name: _merge(defaults, own or {}) for name, own in agents.items()}
    config = validated(Config, values, where)
    check(config, where)
    return config


def to_yaml(config: Config) -> str:
    """The resolved configuration, every value written out; :func:`load` reads it back equal."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def validated(kind: Any, values: dict[str, Any], where: str) -> Any:
    """``values`` as an instance of the dataclass ``kind``; every fault becomes one line of a ``ConfigError``."""
    for key in values:  # plain dataclasses (a task, a protocol) let unknown keys pass
        if not is_pydantic_dataclass(kind) and key not in {f.name for f in dataclasses.fields(kind)}:
            raise ConfigError(f"{where}: unknown key {key!r}; {_nearest(kind, (key,))}")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = [_explain(kind, fault) for fault in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(dict.fromkeys(lines))) from None


def check(config: Config, where: str) -> None:
    """What no single field can say: parts that must fit each other. Loads no model."""
    from maporl.protocols import build_protocol
    from maporl.rewards import SOURCES
    from maporl.tasks import TASKS, Task, build_task

    if config.ppo.total_episodes is not None:
        raise ConfigError(f"{where}: ppo.total_episodes: the length of a run is set by 'updates'; remove it")
    if (
        config.training.gradient_accumulation_steps
        * config.training.per_device_train_batch_size
        % config.ppo.num_mini_batches
    ):
        raise ConfigError(
            f"{where}: ppo.num_mini_batches={config.ppo.num_mini_batches} does not divide the "
            f"{config.questions_per_update()} questions of an update; change it or training.per_device_train_batch_size"
        )
    for name, agent in config.agents.items():
        _check_agent(name, agent, where)
    if not any(a.trainable and a.engine == "transformers" for a in config.agents.values()):
        raise ConfigError(
            f"{where}: agents: none is trainable, so there is nothing to learn; set trainable: true for one"
        )
    _check_policies(config, where)
    _check_restating(config, where)
    for source in config.reward.sources:
        if source not in SOURCES:
            raise ConfigError(f"{where}: reward.sources: {unknown(source, SOURCES)}")
    protocol = build_protocol(config.protocol, tuple(config.agents), where)
    try:
        config.schedule.resolved(getattr(protocol, "turns", 1), tuple(config.agents))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    used = {*config.reward.sources, *getattr(protocol, "between_turns", frozenset)()}
    if "verifier" in used and config.reward.verifier is None:
        raise ConfigError(
            f"{where}: reward.verifier: a verifier scores or gives feedback here, so its model is needed; for example "
            "reward.verifier: {model: FOLDER}"
        )
    build_task(config.task, "train", config.seed, where)
    if config.warm_start.steps and TASKS[config.task["name"]].write_answer is Task.write_answer:
        raise ConfigError(
            f"{where}: warm_start: task {config.task['name']!r} cannot write example answers; set warm_start.steps to 0"
        )


def _check_agent(name: str, agent: AgentSection, where: str) -> None:
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{where}: agents: {name!r} is no name for a folder; use letters, digits, '-' and '_'")
    if agent.engine == "human":
        return
    if (agent.model is None) == (agent.tiny is None):
        raise ConfigError(
            f"{where}: agents.{name}: give either 'model' (a hub name or folder) or 'tiny', got {'both' if agent.model else 'neither'}"
        )
    for key in ("model", "tokenizer", "adapter"):
        value = getattr(agent, key)
        if value is not None and _looks_like_path(value) and not Path(value).is_dir():
            raise ConfigError(
                f"{where}: agents.{name}.{key}: no folder {value!r}; expected a folder or a hub name like org/name"
            )
    if agent.load_in_4bit and agent.lora is None and agent.adapter is None and agent.trainable:
        raise ConfigError(
            f"{where}: agents.{name}.load_in_4bit: quantised weights cannot be trained; add lora: {{}} or set trainable: false"
        )
    if (agent.critic == "adapter") and agent.lora is None and agent.adapter is None:
        raise ConfigError(f"{where}: agents.{name}.critic: 'adapter' needs a LoRA; add lora: {{}} or use critic: head")


def _check_restating(config: Config, where: str) -> None:
    """The untrained weights must still be there: under adapters, or as the reference of the KL penalty."""
    for name, agent in config.agents.items():
        whole = agent.engine == "transformers" and agent.trainable and agent.lora is None and agent.adapter is None
        if config.restate == "base_model" and whole and config.ppo.kl_coef == 0:
            raise ConfigError(
                f"{where}: restate: agents.{name} trains all its weights and keeps no reference at ppo.kl_coef 0, so the "
                "base model is gone; give it a lora, set ppo.kl_coef above 0, or restate: off"
            )


def _check_policies(config: Config, where: str) -> None:
    """Agents that name one policy share its weights, so whatever describes the weights must agree."""
    first: dict[str, str] = {}
    for name, agent in config.agents.items():
        policy = agent.policy or name
        other = first.setdefault(policy, name)
        for key in (
            "model", "tiny", "lora", "adapter", "dtype", "load_in_4bit", "policy_per", "trainable", "learning_rate", "critic",
        ):  # fmt: skip
            mine, theirs = getattr(agent, key), getattr(config.agents[other], key)
            if mine != theirs:
                raise ConfigError(
                    f"{where}: agents {other!r} and {name!r} share policy {policy!r} but differ in {key}: {theirs!r} and {mine!r}"
                )


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with its ``extends`` merged under it; duplicate keys are an error."""
    if not path.is_file():
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
            if path.parent.is_dir()
            else []
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(values).__name__}")
    parent = values.pop("extends", None)
    return _merge(read_yaml(path.parent / parent), values) if parent else values


def unknown(name: str, known: Any) -> str:
    """``unknown 'x'; did you mean 'y'? known: ...``."""
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(name), names, 1)
    return f"unknown {name!r}{f'; did you mean {near[0]!r}?' if near else ';'} known: {', '.join(names)}"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _merge(under: dict, over: dict) -> dict:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _apply(values: dict, overrides: list[str]) -> dict:
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {override}: expected key=value, for example --set training.learning_rate=1e-4")
        nested: Any = yaml.safe_load(text)
        for key in reversed(path.split(".")):
            nested = {key: nested}
        values = _merge(values, nested)
    return values


def _explain(kind: type, fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"unknown key {location!r}; {_nearest(kind, fault['loc'])}"
    if fault["type"] in ("missing", "missing_argument"):
        return f"{location}: this key is required"
    got = "" if fault["type"] in ("value_error",) else f", got {fault['input']!r:.80}"
    return f"{location}: {fault['msg'].removeprefix('Value error, ')}{got}"


def _nearest(kind: type, location: tuple) -> str:
    """The keys known at ``location``, and the nearest to its last part."""
    current: Any = kind
    for part in location[:-1]:
        if dataclasses.is_dataclass(current):
            hints = {f.name: f.type for f in dataclasses.fields(current)}
            current = hints.get(part, current)
        else:
            continue
        current = _dataclass_in(current) or current
    names = [f.name for f in dataclasses.fields(current)] if dataclasses.is_dataclass(current) else []
    near = difflib.get_close_matches(str(location[-1]), names, 1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(names)}"


def _dataclass_in(hint: Any) -> type | None:
    if dataclasses.is_dataclass(hint):
        return hint  # type: ignore[return-value]
    for part in getattr(hint, "__args__", ()):
        if found := _dataclass_in(part):
            return found
    return None


def _looks_like_path(value: str) -> bool:
    return value.startswith((".", "/", "~")) or value.count("/") > 1
