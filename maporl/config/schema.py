"""The sections of a configuration: their names, types, defaults and limits, declared here once. No torch.

PPO's own options are in :mod:`trl_ext.ppo_options`; ``configs/ppo/base.yaml`` shows everything with a comment above each.
"""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from maporl.config.engines import ENGINES
from maporl.schedules import Freeze, OpponentPool, RoundRobin, Schedule, Span, Stage, Swap
from trl_ext.ppo_options import LearnerOptions, PPOOptions, option

STRICT = ConfigDict(extra="forbid")
TOKEN_VARIABLE = "MAPORL_SERVER_TOKEN"
"""The environment variable that the reward server, and its client, read the bearer token from."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


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
class ApiSection:
    """An agent behind an OpenAI-compatible endpoint: speaks, and never learns.

    ``key_variable`` is the environment variable with the API key. ``temperature``: None takes the run's. ``cache``: answers are
    kept on disk, by model, conversation and place in the run, so that a run that is repeated asks (and pays) once.
    """

    model: str
    base_url: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    max_tokens: Positive | None = None
    temperature: NotNegative | None = None
    concurrency: Positive = 16
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    retries: Annotated[int, Field(ge=0)] = 5
    cache: bool = True


def check_urls(urls: Iterable[str]) -> None:
    """Raise unless all of ``urls`` name a server."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"urls: expected http://HOST:PORT, got {url!r}")


@dataclass(frozen=True, config=STRICT)
class ColocateSection:
    """vLLM in the trainer's process: its share of the GPU's memory, its longest conversation, and further ``options`` of
    ``vllm.LLM``."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.3
    max_model_len: Positive | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclass(frozen=True, config=STRICT)
class VLLMSection:
    """vLLM that answers for an agent whose weights are trained here (``maporl.engines.vllm``).

    ``urls``: each serves the agent's base model; or ``colocate``, in this process. ``base``: their name for it; by default what they list. ``folder``: where
    adapters are written for them to read; by default in the run's folder. ``timeout``: seconds of a request. ``seeds``: send
    a seed with every request, so that a run repeats as far as the server does (vLLM 0.32 on CPUs dies of seeds).
    """

    urls: list[str] = dataclasses.field(default_factory=list)
    colocate: ColocateSection | None = None
    base: str | None = None
    folder: str | None = None
    seeds: bool = True
    key_variable: str = "VLLM_API_KEY"
    concurrency: Positive = 64
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    retries: Annotated[int, Field(ge=0)] = 3

    def __post_init__(self):
        if bool(self.urls) == (self.colocate is not None):
            raise ValueError(f"expected either urls or colocate, got urls {self.urls} and colocate {self.colocate}")
        check_urls(self.urls)


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"unknown {name!r}; known: {', '.join(ENGINES)}")
    return name


EngineName = Annotated[str, AfterValidator(_known_engine), Field(json_schema_extra={"enum": list(ENGINES)})]


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
    load_in_8bit: bool = False
    policy: str | None = None
    policy_per: Literal["agent", "turn", "first_and_rest"] = "agent"
    role: str | None = None
    system: str | None = None
    trainable: bool = True
    learning_rate: NotNegative | None = None
    critic: Literal["head", "adapter", "model", "none"] | None = None
    engine: EngineName = "transformers"
    engine_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    api: ApiSection | None = None
    vllm: VLLMSection | None = None

    @property
    def weights(self) -> bool:
        """Whether the agent has weights in this process."""
        return ENGINES[self.engine].weights

    def options_of_engine(self) -> Any:
        """What its engine is built from: the section that goes with the engine, or ``engine_options``."""
        section = ENGINES[self.engine].section
        return self.engine_options if section is None else getattr(self, section)


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
        check_urls(self.urls)
        if self.api == "vllm" and self.model is None:
            raise ValueError("api: vllm needs 'model' too, whose tokenizer encodes the chats")
        if self.learn_every and (self.urls or self.model is None):
            raise ValueError("learn_every: only a verifier in this process can learn; give 'model' and no 'urls'")


@dataclass(frozen=True, config=STRICT)
class JudgeSection:
    """Of the source ``judge``: an agent of the team that scores every answer.

    ``prompt`` may use ``{question}``, ``{answer}`` and ``{reference}``; the last number that ``pattern`` finds, over
    ``largest``, is the reward. ``unreadable``: what a verdict without a number gives; None: it stops the run.
    """

    agent: str
    prompt: str = (
        "{question}\n\nAn answer to this:\n{answer}\n\nHow good is it? End with a line 'Score: N', N from 0 to 10."
    )
    pattern: str = r"[Ss]core:\s*(\d+(?:\.\d+)?)"
    largest: Annotated[float, Field(gt=0)] = 10.0
    unreadable: Finite | None = None


@dataclass(frozen=True, config=STRICT)
class ArenaSection:
    """Of the source ``arena``: an agent of the team that says which of two last answers is better.

    ``prompt`` may use ``{question}``, ``{first}`` and ``{second}``; the last A or B that ``pattern`` finds is preferred.
    """

    agent: str
    prompt: str = (
        "{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better? End with a line 'Better: A' or "
        "'Better: B'."
    )
    pattern: str = r"[Bb]etter:\s*([AB])"


@dataclass(frozen=True, config=STRICT)
class RewardSection:
    """Where scores come from and how an utterance is credited with them.

    Without ``rules``, by MAPoRL's ``horizon``, ``share`` and ``discount`` (``maporl.rewards.shaping``); with them, by these
    from left to right (``maporl.rewards.rules``), beginning with every utterance's own score.
    """

    sources: Annotated[dict[str, Finite], Field(min_length=1)] = dataclasses.field(
        default_factory=lambda: {"label": 1.0}
    )
    horizon: Literal["current", "last", "discounted_sum"] = "discounted_sum"
    share: Literal["individual", "all"] = "all"
    discount: NotNegative = 0.3
    rules: tuple[str | dict[str, dict[str, Any]], ...] = ()
    verifier: VerifierSection | None = None
    judge: JudgeSection | None = None
    arena: ArenaSection | None = None
    bonus: BonusSection | None = None
    penalties: PenaltySection | None = None


@dataclass(frozen=True, config=STRICT)
class BranchingSection:
    """How many dialogues a question is played in while training, and from where they part (``maporl.rollout.branching``).

    ``how``: ``independent`` from the beginning; ``fork_first`` and ``fork_random``: one dialogue, forked before its first or
    a random step; ``fork_every``: before every step; ``tree``: ``group`` candidates at every step, of which one is gone on
    with; ``best_of``: the best of ``drafts`` first steps is forked. ``joint``: where several speak at once, whether the k-th
    answers of all make a dialogue (aligned), or every combination does (cross). ``pick``: the candidate to go on with.
    ``common_seed``: whether what a protocol draws at random is the same in all dialogues of a question. ``resample``:
    questions whose dialogues all earned the same are replaced by others, so many times at most (DAPO's dynamic sampling).
    """

    how: Literal["independent", "fork_first", "fork_random", "fork_every", "tree", "best_of"] = "independent"
    group: Positive = 1
    joint: Literal["aligned", "cross"] = "aligned"
    pick: Literal["best", "sample"] = "best"
    drafts: Annotated[int, Field(ge=2)] = 4
    common_seed: bool = True
    resample: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self):
        if self.how not in ("independent", "best_of") and self.group < 2:
            raise ValueError(f"group: {self.how} needs at least 2 dialogues per question, got {self.group}")
        if self.joint == "cross" and self.how != "fork_every":
            raise ValueError(
                f"joint: cross combines answers where every step forks; set how: fork_every, got {self.how}"
            )


@dataclass(frozen=True, config=STRICT)
class AdvantageConfig:
    """How credits become advantages: return, baseline, scale and posts over rows grouped by ``key``.

    The slots are in ``maporl.advantages``: RETURNS (and ``token_gae``, PPO's own over tokens), BASELINES, SCALES, TRANSFORMS.

    ``key``: rows with equal values of these columns are compared. ``gamma``, ``lam``: per utterance (per token they are
    ``ppo.gamma`` and ``ppo.lam``). ``ddof``: 1 for the unbiased standard deviation, 0 for the population's. ``eps`` is
    added to it. ``ema``: how much of the running mean is kept. ``unit``: whether each row counts once in a statistic, or
    each rollout, by the mean of its rows. ``singleton``: what a group of one is.
    """

    returns: str = "token_gae"
    baseline: str = "critic"
    scale: str = "std"
    key: tuple[str, ...] = ("agent", "turn")
    post: tuple[str | dict[str, dict[str, Any]], ...] = ()
    gamma: Share = 1.0
    lam: Share = 0.95
    ddof: Literal[0, 1] = 1
    eps: NotNegative = 1e-6
    ema: Share = 0.95
    unit: Literal["row", "rollout"] = "row"
    singleton: Literal["error", "zero"] = "error"


@dataclasses.dataclass
class TrainingOptions(LearnerOptions):
    """How learning is run: the YAML section ``training:``, and the base of :class:`maporl.MultiAgentPPOConfig`.

    What ``transformers.TrainingArguments`` has too bears its name and its default, and counts updates.
    """

    per_device_train_batch_size: Positive = option(8, "Rows per forward and backward pass.")
    gradient_accumulation_steps: Positive = option(
        1, "Dialogues of an update = per_device_train_batch_size x gradient_accumulation_steps, on each process."
    )
    warmup_steps: NotNegative = option(0.0, "Updates in which the learning rate rises.")
    max_grad_norm: NotNegative = option(1.0, "Norm that the gradient of a policy is clipped to; 0: no clipping.")
    weight_decay: NotNegative = option(0.0, "Weight decay of AdamW.")
    adam_beta2: Share = option(0.999, "Second beta of AdamW.")
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"] = option(
        "adamw_torch_fused", "Optimizer; the last two keep two bytes of state per trained number instead of eight."
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    bf16: bool = option(False, "Mixed precision: float32 weights, bfloat16 arithmetic.")
    use_cpu: bool = option(False, "Train on the CPU even if there is a GPU.")
    save_steps: Annotated[int, Field(ge=0)] = option(500, "Save a checkpoint every so many updates; 0: never.")
    save_total_limit: Positive | None = option(None, "How many checkpoints are kept; the oldest go first.")
    eval_steps: Annotated[int, Field(ge=0)] | None = option(
        None, "Evaluate every so many updates; none: only before and after training."
    )
    report_to: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "Where else to log: tensorboard, wandb, trackio."}
    )
    critic_per_turn: bool = option(True, "One output of the critic's head for each turn.")
    critic_context: Literal["dialogue", "answer", "joint"] = option(
        "dialogue",
        "What the critic reads before an answer: all that its agent saw, the question alone, or the question and all "
        "agents' words so far.",
    )
    async_depth: Literal[0, 1] = option(
        0, "1: play the dialogues of the next update while this one is learned from; with engines elsewhere (vllm)."
    )
    placement: Literal["shared", "split"] = option(
        "shared",
        "All learners on this process's device, or each base model, with its adapters, on a device of its own.",
    )


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


def _off(value: Any) -> Any:
    """YAML reads a bare ``off`` as false."""
    return "off" if value is False else value


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """What a run in YAML and a trainer in Python are told alike."""

    restate: Annotated[Literal["off", "base_model"], BeforeValidator(_off)] = option(
        "off", "Ask the untrained model for the final answer where grading finds none; only grading and others read it."
    )
    dialogues_logged: Annotated[int, Field(ge=0)] = option(
        4, "Dialogues of each update that are written to dialogues.jsonl."
    )


for _plain in (
    PPOOptions,
    LearnerOptions,
    TrainingOptions,
    RunOptions,
    Schedule,
    Span,
    Freeze,
    Swap,
    RoundRobin,
    OpponentPool,
    Stage,
):
    setattr(_plain, "__pydantic_config__", STRICT)  # noqa: B010  # plain dataclasses, declared where they are used


@dataclass(config=STRICT)
class Config(RunOptions):
    """One run."""

    output_dir: str
    task: dict[str, Any]
    agents: Annotated[dict[str, AgentSection], Field(min_length=1)]
    protocol: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "debate"})
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    updates: Positive = 100
    branching: BranchingSection = dataclasses.field(default_factory=BranchingSection)
    reward: RewardSection = dataclasses.field(default_factory=RewardSection)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    ppo: PPOOptions = dataclasses.field(default_factory=PPOOptions)
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)
    warm_start: WarmStartSection = dataclasses.field(default_factory=WarmStartSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)

    def questions_per_update(self) -> int:
        """Dialogues that one update plays."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
