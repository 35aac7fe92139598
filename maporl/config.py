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

TOKEN_VARIABLE = "MAPORL_SERVER_TOKEN"
"""The environment variable that the reward server, and its client, read the bearer token from."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


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

    def __post_init__(self):
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet: expected every character once, got {self.alphabet!r}")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by heads={self.heads}; change one of them"
            )
        if self.architecture != "gpt_neox" and self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} with heads={self.heads}: {self.architecture} needs an even share of the "
                "width for each head; change one of them"
            )


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

    alpha: Annotated[list[Finite], Field(min_length=4, max_length=4)]
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
    """A learned verifier: a sequence classifier with one output, whose sigmoid is the score.

    In this process if there is only a ``model``; served if there are ``urls``, or none of both here and some in the
    environment (``MAPORL_VERIFIER_URLS``). ``batch_size``: chats of a forward, or of a request. ``timeout``: seconds.
    ``on_failure``: after ``retries``, stop the run, wait for the servers as long as it takes, or use the task's grades.
    ``learn_every``: in this process only, learn from graded answers every so many updates; 0: never.
    """

    model: str | None = None
    batch_size: Positive = 16
    urls: tuple[str, ...] = ()
    api: Literal["maporl", "vllm"] = "maporl"
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    retries: Annotated[int, Field(ge=0)] = 5
    concurrency: Positive = 32
    on_failure: Literal["stop", "wait", "label"] = "stop"
    learn_every: Annotated[int, Field(ge=0)] = 0
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5

    def __post_init__(self):
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: expected http://HOST:PORT, got {url!r}")
        if self.api == "vllm" and self.model is None:
            raise ValueError("api: vllm needs 'model' too, whose tokenizer encodes the chats")
        if self.learn_every and (self.urls or self.model is None):
            raise ValueError("learn_every: only a verifier in this process can learn; give 'model' and no 'urls'")


@dataclass(frozen=True, config=STRICT)
class RewardSection:
    """Where scores come from and how an utterance is credited with later ones (``maporl.rewards.shaping``)."""

    sources: Annotated[dict[str, Finite], Field(min_length=1)] = dataclasses.field(
        default_factory=lambda: {"label": 1.0}
    )
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
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
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
    from maporl.config_checks import check  # it knows tasks and protocols, and they need this module

    values = dict(values)
    defaults = values.pop("agent_defaults", None)
    if not isinstance(defaults, dict | None):
        raise ConfigError(f"{where}: agent_defaults: expected options of agents by name, got {defaults!r:.80}")
    agents = values.get("agents")
    if isinstance(agents, dict):  # an agent that is no mapping is left for the schema to refuse
        values["agents"] = {
            name: _merge(defaults or {}, own or {}) if isinstance(own, dict | None) else own
            for name, own in agents.items()
        }
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


def read_yaml(path: Path, overlays: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a YAML file, with its ``extends`` merged under it; duplicate keys are an error.

    ``overlays``: the files that extend this one.
    """
    if path.resolve() in overlays:
        raise ConfigError(
            f"{path}: extends itself, by way of {overlays[-1].name}; remove 'extends' from one of the files"
        )
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
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {_one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(values).__name__}")
    parent = values.pop("extends", None)
    if not isinstance(parent, str | None):
        raise ConfigError(f"{path}: extends: expected the name of one file, got {parent!r:.80}")
    return _merge(read_yaml(path.parent / parent, (*overlays, path.resolve())), values) if parent else values


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
        try:
            nested: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not readable as YAML: {_one_line(error)}") from None
        for key in reversed(path.split(".")):
            nested = {key: nested}
        values = _merge(values, nested)
    return values


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
