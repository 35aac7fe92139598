"""The options of PPO and of learners, declared once. Imports no torch.

These dataclasses are the YAML sections, and also the bases of :class:`trl_ext.PPOv2Config`.
"""

import inspect
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

T = TypeVar("T")


@dataclass(frozen=True)
class _IsFinite:
    """Lets pydantic, which reads YAML, refuse infinity and NaN."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler(source) | {"allow_inf_nan": False}


Natural = Annotated[int, Ge(0)]
"""A whole number, 0 or more."""
Positive = Annotated[int, Ge(1)]
"""A whole number, 1 or more."""
Finite = Annotated[float, _IsFinite()]
"""Any number but infinity and NaN."""
NotNegative = Annotated[Finite, Ge(0)]
"""A finite number, 0 or more."""
AboveZero = Annotated[Finite, Gt(0)]
"""A finite number above 0, such as a time in seconds or a learning rate."""
Share = Annotated[Finite, Ge(0), Le(1)]
"""A share from 0 to 1, both included."""
PositiveShare = Annotated[float, Gt(0), Le(1)]
"""A share above 0, up to all."""
ProperShare = Annotated[float, Gt(0), Lt(1)]
"""A share above 0 and below 1: some, and not all."""

_BOUNDS = {
    "ge": (operator.ge, "of at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}
"""When a number keeps a bound, and how a message tells the bound, by the name that annotated_types gives it."""


def check_numbers(part: Any) -> None:
    """Check the numbers of the dataclass ``part`` whose types have bounds, such as :data:`Positive`.

    A part that is made in Python is checked by this, and what stands in a file by pydantic, which reads the same types.

    Raises:
        ValueError: a number is out of its bounds, or something else. The message names the field and the bounds.
    """
    for name, optional, bounds in _bounded(part.__class__):
        value = getattr(part, name)
        if value is None and optional:
            continue
        is_number = isinstance(value, numbers.Real) and value < math.inf  # type: ignore[operator]
        if not is_number or not all(_BOUNDS[kind][0](value, bound) for kind, bound in bounds):  # or it is NaN
            expected = " and ".join(f"{_BOUNDS[kind][1]} {bound}" for kind, bound in bounds)
            raise ValueError(f"{name}: expected a number {expected}, got {value!r:.80}")


@cache
def _bounded(kind: type) -> list[tuple[str, bool, list[tuple[str, float]]]]:
    """Return the name of each field of ``kind`` that is a number with bounds, if it may be None, and the bounds."""
    # and not those of fields, because the parsers of transformers and TRL write plain types into these
    hints = {name: hint for base in reversed(kind.__mro__) for name, hint in inspect.get_annotations(base).items()}
    found = []
    for declared in fields(kind):
        hint = hints[declared.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        marks = [getattr(part, "__metadata__", ()) for part in kinds if part is not NoneType]
        bounds = [(name, getattr(mark, name)) for mark in marks[0] for name in _BOUNDS if hasattr(mark, name)]
        if bounds and len(marks) == 1:
            found.append((declared.name, NoneType in kinds, bounds))
    return found


def described(schema: dict[str, Any], kind: Any) -> None:
    """Put the help that stands beside each field of ``kind`` into the JSON schema of it, or of some of its fields."""
    for declared in fields(kind):
        if (told := declared.metadata.get("help")) and declared.name in schema["properties"]:
            schema["properties"][declared.name]["description"] = told


READ: dict[str, Any] = {"extra": "forbid", "json_schema_extra": described}
"""How pydantic reads a class of options: an unknown key is an error, and editors are shown the help of each key."""


@dataclass_transform()
def options(*, frozen: bool = False, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a dataclass of options: a plain one, which pydantic reads from a file as
    :data:`READ` says, and whose numbers are checked by :func:`check_numbers` if it has no ``__post_init__``."""

    def make(kind: type[T]) -> type[T]:
        kind.__pydantic_config__ = READ  # type: ignore[attr-defined]
        if not hasattr(kind, "__post_init__"):
            kind.__post_init__ = check_numbers  # type: ignore[attr-defined]
        return dataclass(frozen=frozen, kw_only=kw_only)(kind)

    return make


def option(default: Any = MISSING, help: str | None = None, *, factory: Any = MISSING, **metadata: Any) -> Any:
    """Return a field of a dataclass of options: its default, and the help text that stands beside it.

    Command lines, the reference and the file that shows every key read the text from here. A default that is a list or
    a dict is copied for each instance, and instances have equal hashes whatever it holds.

    Args:
        default: the default. Without it and without ``factory``, the option must be given.
        help: what the option is. Values stand in it as in Python: None, True and False.
        factory: a function that makes the default.
        **metadata: what else a reader of the field is told, such as the option's name on a command line.
    """
    told = {"help": help, **metadata}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, hash=False, metadata=told)
    return field(default=default, default_factory=factory, metadata=told)


class _OneServesToo:
    """Lets pydantic, which reads YAML, accept one number in the place of a list of numbers."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(int | list[int] | None)


if TYPE_CHECKING:
    TokenIds = int | list[int] | None
else:
    # the command-line parsers of transformers and TRL see a list, because they refuse a union of it and a number
    TokenIds = Annotated[list[int] | None, _OneServesToo()]


@dataclass(frozen=True)
class Decoding:
    """How the next token is drawn from a model's distribution.

    It is drawn at ``temperature``, from the ``top_k`` likeliest tokens, and of these from the fewest that have
    ``top_p`` of the probability (nucleus sampling, Holtzman et al. 2020). A ``top_k`` of 0 and a ``top_p`` of 1 keep
    all tokens. A ``temperature`` of 0 is greedy; the other two then change nothing.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    @property
    def cut(self) -> bool:
        """Whether less than the whole distribution is sampled from."""
        return self.top_p < 1 or self.top_k > 0


BATCH_ROWS = 64
"""The rows of a batch, where no option says them and no free memory decides."""

GREEDY = Decoding(0.0)
"""The likeliest token at each step."""


WHOLE_RATE, ADAPTER_RATE = 3e-6, 1e-4
"""The learning rates of whole models, which is that of TRL 1.12's ``PPOConfig``, and of adapters where none is set."""


class DefaultRate(float):
    """A learning rate that nobody set, in arguments whose rate must be a number. It is that of whole models."""


def rate_of(*rates: float | None, adapter: bool, whole: float = WHOLE_RATE) -> float:
    """Return the learning rate of a part that is trained: the first of ``rates`` that was set, or else its default.

    Args:
        rates: what was set, the nearest first. None and a :class:`DefaultRate` were not.
        adapter: whether an adapter is trained, and not whole weights. Its default is :data:`ADAPTER_RATE`.
        whole: the default of whole weights.
    """
    chosen = (rate for rate in rates if rate is not None and not isinstance(rate, DefaultRate))
    return next(chosen, ADAPTER_RATE if adapter else whole)


@options()
class PPOOptions:
    """PPO hyper-parameters, with the names and defaults of TRL 1.12's ``PPOConfig``.

    Raises:
        ValueError: an option is out of its range, or two options exclude each other.
    """

    total_episodes: Positive | None = option(
        None,
        "Episodes of the whole run; default: num_train_epochs over the data. An episode is a question that is "
        "asked of a team, and a completion of one policy. A configuration leaves it out, because `updates` sets "
        "the length of a run.",
    )
    num_ppo_epochs: Positive = option(4, "Passes over each collected batch.")
    num_mini_batches: Positive = option(1, "Optimizer steps per pass: the batch is cut into this many minibatches.")
    local_rollout_forward_batch_size: Positive | None = option(
        None,
        "Rows per batch of sampling, and per batch of a reward model. None: 64; on an accelerator, the models of a "
        "run sample 64, 128 or 256 rows at a time, as its free memory allows.",
    )
    max_tokens_per_generate: int | None = option(
        None,
        "Most tokens, padding included, in a batch of sampling; local_rollout_forward_batch_size limits its rows. "
        "None: only the rows are limited.",
    )
    keep_states: bool = option(
        True, "Keep the KV cache of a conversation between its turns (memory for speed; not with sliding windows)."
    )
    keep_states_gib: float | None = option(
        None,
        "Most GiB of kept KV cache; what does not fit is read again, with equal results. None: half of the free "
        "memory.",
    )
    max_tokens_per_microbatch: Positive | None = option(
        None,
        "Most tokens, padding included, that one forward of training reads; per_device_train_batch_size limits "
        "its rows. What rows share, such as a prompt, counts once. A longer row is read alone. None: on an "
        "accelerator, what its free memory holds; on CPUs only the rows are limited.",
    )
    logits_chunk: Positive | None = option(
        None, "Compute logits for this many tokens at a time, and again in the backward pass; None: for all at once."
    )
    response_length: Positive = option(53, "Most tokens of a completion.")
    stop_token: Literal["eos", "none"] | None = option(
        None,
        "Where a completion ends. None: at the model's own EOS ids; eos: at the tokenizer's EOS only; none: "
        "always at the full length.",
    )
    stop_token_id: TokenIds = option(None, "Stop at this id, or one of these, instead.")
    stop_strings: list[str] | None = option(
        None,
        "End a completion once its text contains one of these strings, whose tokens it keeps (an agent behind an "
        "API leaves the string out).",
    )
    temperature: float = option(0.7, "Sampling temperature; log-probabilities are taken at the same one.")
    top_p: PositiveShare = option(
        1.0, "Sample from the likeliest tokens that have this share of the probability; 1: from all tokens."
    )
    top_k: Natural = option(
        0,
        "Sample from this many likeliest tokens; 0: from all. top_p cuts what this leaves. The policy that is "
        "trained stays the whole distribution: all log-probabilities but the sampler's are those at this "
        "temperature without any cut.",
    )
    missing_eos_penalty: NotNegative | None = option(
        None,
        "Subtracted from the score of a completion that does not end by itself.",
    )
    kl_coef: NotNegative = option(
        0.05,
        "Weight of the KL penalty against the reference, the policy's own starting point. At 0 no reference is kept.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = option(
        "k1",
        "Estimator of the KL penalty: k1, k2 or k3 (trl_ext.ppo.maths.kl_estimate).",
    )
    kl_in: Literal["reward", "loss"] = option(
        "reward",
        "Where the KL penalty goes: subtracted from the rewards (reward), or added to the loss (loss, with k2 or "
        "k3 only).",
    )
    objective: str = option(
        "ppo",
        "Policy loss, a name of trl_ext.ppo.losses.OBJECTIVES: ppo (clipped), reinforce (-A log pi), or dis "
        "(reinforce with the ratio as weight, and without tokens whose ratio has left the clip range on either side).",
    )
    ratio_to: Literal["update", "sampler"] = option(
        "update",
        "The policy below the ratio: the one before the update (update), or the one that sampled, by the "
        "log-probabilities that its engine told (sampler). They differ if answers are of older weights.",
    )
    ratio: Literal["token", "sequence", "sequence_mean", "trajectory"] = option(
        "token",
        "Ratio of new to old probability: of each token (token), of the whole completion, the product over its "
        "tokens (sequence), their geometric mean (sequence_mean, GSPO), or of all completions of a trajectory "
        "(trajectory, M-GRPO): those of an agent in a dialogue, where a called answer is a trajectory of its own.",
    )
    cliprange: NotNegative = option(0.2, "Clip range of the policy ratio.")
    cliprange_high: NotNegative | None = option(None, "Clip range above 1 (clip-higher); default: cliprange.")
    dual_clip: Annotated[Finite, Ge(1)] | None = option(
        None, "Bound the loss at this many times -A where A < 0 (dual clip), e.g. 3."
    )
    tis_cap: NotNegative | None = option(
        None, "Largest importance weight of reinforce (truncated importance sampling); None: weight 1."
    )
    engine_tis_cap: NotNegative | None = option(
        None,
        "Weigh every token by the trainer's probability of it over the engine's, at most by this cap. None: no "
        "weights.",
    )
    engine_tis_mode: Literal["token_truncate", "token_mask", "sequence_mask"] = option(
        "token_truncate",
        "What happens to weights above engine_tis_cap (c): token_truncate (cut to it), token_mask (a token with "
        "one above c or below 1/c is not trained on), or sequence_mask (a whole completion is not, if the product "
        "of its weights is outside).",
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "per_main_rollout"] = option(
        "token_mean",
        "How the policy loss is averaged: over tokens (token_mean), over the completions' token means "
        "(sequence_mean), over their token sums (sequence_sum), or the sum of the completions' token means "
        "divided by the number of rollouts (per_main_rollout, MATPO).",
    )
    entropy_coef: NotNegative = option(0.0, "Weight of the entropy bonus.")
    value_loss: Literal["clipped", "huber", "hl_gauss"] = option(
        "clipped",
        "Critic's loss: clipped (squared error), huber, which is clipped too, or hl_gauss: the critic gives a "
        "distribution over bins, which learns histograms of returns by cross-entropy (arXiv 2403.03950, 2608.02181).",
    )
    value_bins: Annotated[int, Ge(2)] = option(101, "For hl_gauss: the number of bins.")
    value_range: list[float] | None = option(
        None,
        "For hl_gauss: the smallest and the largest return, as [0.0, 1.0]. A return beyond it counts as its end. None: "
        "the range that the scores of a team can take, where its rewards have one.",
    )
    value_sigma: AboveZero = option(
        0.75, "For hl_gauss: the standard deviation of the histogram of a return, in widths of a bin."
    )
    huber_delta: AboveZero = option(10.0, "Error at which the Huber loss turns linear.")
    vf_coef: NotNegative = option(0.1, "Weight of the critic's loss.")
    cliprange_value: NotNegative = option(0.2, "Clip range of the critic's values.")
    target_kl: float | None = option(
        None, "End an update's passes early once the approximate KL to the policy that sampled exceeds this."
    )
    gamma: NotNegative = option(1.0, "Discount per token.")
    lam: Share = option(0.95, "Lambda of GAE per token.")
    lam_alpha: AboveZero | None = option(
        None,
        "Length-adaptive lambda (VAPO): for the advantages of an answer of l tokens, lambda is "
        "1 - 1 / (lam_alpha * l), and at least 0, in place of lam; e.g. 0.05.",
    )
    lam_critic: Share | None = option(
        None, "Lambda of the critic's targets; default: that of the advantages. 1: the returns themselves."
    )
    critic_updates: Positive = option(
        1,
        "Optimizer steps of the critic for each step of the policy (SAO takes 2). The further ones train the critic "
        "alone, on the same minibatch.",
    )
    whiten_rewards: bool = option(False, "Scale token rewards to unit variance before GAE.")

    def __post_init__(self):
        check_numbers(self)
        if self.engine_tis_mode != "token_truncate":
            if self.engine_tis_cap is None:
                raise ValueError(f"engine_tis_mode: {self.engine_tis_mode} needs engine_tis_cap, e.g. 2.0")
            if self.engine_tis_cap <= 1:
                raise ValueError(
                    f"engine_tis_cap: expected a number above 1 for {self.engine_tis_mode}, which trains between 1/cap "
                    f"and cap, got {self.engine_tis_cap}"
                )
        if self.ratio_to == "sampler" and self.engine_tis_cap is not None:
            raise ValueError(
                "ratio_to: sampler and engine_tis_cap both weigh a token by the policy that sampled it; set one of them"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coef > 0:
            raise ValueError(
                "kl_in: loss needs kl_estimator k2 or k3: the gradient of k1 is 0 in expectation, so it would only "
                "add noise"
            )
        if self.value_range is not None:
            ends = list(self.value_range)
            numbers_only = all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
            if len(ends) != 2 or not numbers_only or ends[0] >= ends[1]:
                raise ValueError(
                    "value_range: expected two numbers, the smaller one first, as [0.0, 1.0], got "
                    f"{self.value_range!r:.80}"
                )
        gib = self.keep_states_gib
        if gib is not None and not (isinstance(gib, int | float) and 0 < gib < math.inf):
            raise ValueError(
                f"keep_states_gib: expected a number above 0, got {gib!r}; keep_states: false keeps nothing"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature: must be above 0, got {self.temperature}; greedy play is for evaluation")
        if self.stop_strings is not None and (
            not isinstance(self.stop_strings, list | tuple)
            or not all(isinstance(s, str) and s for s in self.stop_strings)
        ):
            raise ValueError(
                f"stop_strings: expected a list of texts that are not empty, got {self.stop_strings!r:.80}"
            )
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError("stop_token and stop_token_id exclude each other; set one of them")

    @property
    def compares_sampler(self) -> str:
        """The option that puts probabilities under the policy that sampled into the loss, as answers of older weights
        need, or nothing."""
        if self.ratio_to == "sampler":
            return "ratio_to: sampler"
        return "" if self.engine_tis_cap is None else "engine_tis_cap"

    @property
    def for_critics(self) -> list[str]:
        """The options that are set and that change nothing without a critic."""
        chosen = {
            "value_loss": self.value_loss == "hl_gauss",
            "lam_alpha": self.lam_alpha is not None,
            "lam_critic": self.lam_critic is not None,
            "critic_updates": self.critic_updates > 1,
        }
        return [name for name, is_chosen in chosen.items() if is_chosen]

    @property
    def decoding(self) -> Decoding:
        """How the answers are sampled on which a policy is trained."""
        return Decoding(self.temperature, self.top_p, self.top_k)

    @property
    def batch_rows(self) -> int:
        """The most rows of a batch of whatever does not choose it by the free memory."""
        return self.local_rollout_forward_batch_size or BATCH_ROWS


CriticKind = Literal["head", "adapter", "model", "central", "none"]
CriticFreeze = Literal["none", "attention"]


@options()
class LearnerOptions:
    """How a policy and its critic learn. The YAML section ``training:`` and every trainer share these options.

    Where no learning rate is set, :func:`rate_of` gives whole models that of TRL 1.12's ``PPOConfig``, because scripts
    written for it rely on that, and adapters a higher one, because they need it (Schulman et al. 2025, "LoRA Without
    Regret": at least ten times that of whole models).

    Raises:
        ValueError: an option is out of its range.
    """

    learning_rate: NotNegative | None = option(
        None,
        "Learning rate of the policy, and of the critic unless it has its own. None: 3e-6 where all weights are "
        "trained, TRL's default for PPO, and 1e-4 for an adapter such as a LoRA.",
    )
    value_learning_rate: NotNegative | None = option(
        None, "Learning rate of the critic; default: learning_rate, of which None goes by what the critic trains."
    )
    lr_scheduler_type: str = option("linear", "Schedule of the learning rate, stepped once per update.")
    critic: CriticKind = option(
        "head",
        "Critic when no value_model is passed: a linear head on the policy's trunk (head), an adapter with a head "
        "(adapter), a separate model (model), one separate model for all policies of a team (central), or none "
        "(none; the advantage is the whitened return).",
    )
    detach_critic: bool = option(False, "Keep the critic's loss out of the policy's trunk (critic: head).")
    critic_freeze: CriticFreeze = option(
        "none",
        "What of a critic with a trunk of its own (critic: adapter, model or central) does not learn: nothing, or its "
        "attention (attention; SAO), so that its other layers and its head learn.",
    )
    on_void: Literal["stop", "warn"] = option(
        "stop",
        "What follows an update which shows that nothing can come of the run, such as one whose tokens are all "
        "masked: stop, with the state saved, or warn.",
    )
    async_save: bool = option(
        False,
        "Write checkpoints of policies with all weights trained in the background, while training goes on. Each "
        "process writes what it holds, and a checkpoint appears once it is whole.",
    )
