"""The options of PPO and of learners, declared once. Imports no torch.

These dataclasses are the YAML sections, and also the bases of :class:`trl_ext.PPOv2Config`.
"""

import inspect
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
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


def check_options(part: Any) -> None:
    """Check the options of the dataclass ``part`` by their types and by what :func:`option` says that they must be.

    A type may have bounds, such as :data:`Positive`, or allow a few values only (``Literal``). None is allowed where
    the type says so, and a list has to fit with all its entries. A part that is made in Python is checked by this, and
    what stands in a file by pydantic, which reads the same types.

    Raises:
        ValueError: an option is something else. The message names it, what was expected, and what to do if that was
            declared.
    """
    for name, optional, several, fits, expected, remedy in _typed(part.__class__):
        value = getattr(part, name)
        values = value if several and isinstance(value, list | tuple) else [value]
        if not (value is None and optional) and not all(map(fits, values)):
            raise ValueError(f"{expected}, got {value!r:.80}{remedy and '; '}{remedy}")
    for name, optional, must in _musts(part.__class__):
        if not ((value := getattr(part, name)) is None and optional):
            must(name, value)


class Checked:
    """A base of dataclasses of options, which are checked when they are made (:func:`check_options`)."""

    def __post_init__(self) -> None:
        check_options(self)


@cache
def _typed(kind: type) -> list[tuple[str, bool, bool, Callable[[Any], bool], str, str]]:
    """Return for each field of ``kind`` whose type has bounds or a few values: its name, whether None is allowed, and a
    list, which values fit, what was expected where in words, and what else to do."""
    found = []
    for declared in fields(kind):
        kinds = _kinds_of(kind)[declared.name]
        optional, several = NoneType in kinds, any(get_origin(one) in (list, tuple) for one in kinds)
        entries = [part for one in kinds for part in _entries(one) if part is not NoneType]
        told = [one for one in map(_told, dict.fromkeys(entries)) if one is not None]
        if len(told) == 1 == len(set(entries)):
            place = f"{kind.__name__}: {declared.name}" if get_origin(entries[0]) is Literal else declared.name
            expected = f"{place}: expected {told[0][1]}{', or a list of them' if several else ''}"
            found.append((declared.name, optional, several, told[0][0], expected, remedy_of(declared)))
    return found


@cache
def _kinds_of(kind: type) -> dict[str, list[Any]]:
    """Return the types that each field of ``kind`` may have, several for a union."""
    # and not those of fields, because the parsers of transformers and TRL write plain types into these
    hints = {name: hint for base in reversed(kind.__mro__) for name, hint in inspect.get_annotations(base).items()}
    return {name: list(get_args(h)) if get_origin(h) in (Union, UnionType) else [h] for name, h in hints.items()}


def _entries(hint: Any) -> list[Any]:
    """Return the type of the entries of a list or of a tuple of any length, or else the type itself."""
    inside = get_args(hint)
    several = get_origin(hint) is list or (get_origin(hint) is tuple and inside[1:] == (...,))
    return list(inside[:1]) if several else [hint]


def _told(hint: Any) -> tuple[Callable[[Any], bool], str] | None:
    """Return which values a type with bounds or a few values allows, and what they are in words."""
    if get_origin(hint) is Literal:
        return get_args(hint).__contains__, " or ".join(map(repr, get_args(hint)))
    marks = getattr(hint, "__metadata__", ())
    bounds = [(name, getattr(mark, name)) for mark in marks for name in _BOUNDS if hasattr(mark, name)]
    if not bounds and not any(isinstance(mark, _IsFinite) for mark in marks):
        return None
    number: Any = numbers.Integral if hint.__origin__ is int else numbers.Real

    def fits(value: Any) -> bool:
        is_number = isinstance(value, number) and not isinstance(value, bool) and -math.inf < value < math.inf
        return is_number and all(_BOUNDS[kind][0](value, bound) for kind, bound in bounds)

    limits = " and ".join(f"{_BOUNDS[kind][1]} {bound}" for kind, bound in bounds) or "that is finite"
    return fits, f"a {'whole ' if number is numbers.Integral else ''}number {limits}"


@cache
def _musts(kind: type) -> list[tuple[str, bool, Callable[[str, Any], object]]]:
    """Return the name of each option of ``kind`` that must be something, whether it may be None, and what checks it. A
    class that gives an option another default has what its base declares."""
    bases = [base for base in reversed(kind.__mro__) if is_dataclass(base)]
    musts = {f.name: m for b in bases for f in fields(b) if (m := getattr(f.metadata.get("help"), "must", None))}
    return [(name, NoneType in _kinds_of(kind)[name], must) for name, must in musts.items()]


def remedy_of(declared: Any) -> str:
    """Return what to do where the type of a field refuses a value, as its :func:`option` says."""
    return getattr(declared.metadata.get("help"), "remedy", "")


def described(schema: dict[str, Any], kind: Any) -> None:
    """Put the help that stands beside each field of ``kind`` into the JSON schema of it, or of some of its fields."""
    for declared in fields(kind):
        if (told := declared.metadata.get("help")) and declared.name in schema["properties"]:
            schema["properties"][declared.name]["description"] = str(told)


READ: dict[str, Any] = {"extra": "forbid", "json_schema_extra": described}
"""How pydantic reads a class of options: an unknown key is an error, and editors are shown the help of each key."""


def checked(kind: type[T]) -> type[T]:
    """Let the dataclass ``kind`` check its options (:func:`check_options`) before what it checks itself."""
    own = getattr(kind, "__post_init__", None)
    if own is None or "__post_init__" in vars(kind):  # a base's checks them already

        def __post_init__(self: Any) -> None:
            check_options(self)
            if own is not None:
                own(self)

        kind.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return kind


@dataclass_transform()
def options(*, frozen: bool = False, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a dataclass of options: a plain one, which pydantic reads from a file as
    :data:`READ` says, and whose values are checked (:func:`check_options`) before its own ``__post_init__``."""

    def make(kind: type[T]) -> type[T]:
        kind.__pydantic_config__ = READ  # type: ignore[attr-defined]
        return dataclass(frozen=frozen, kw_only=kw_only)(checked(kind))

    return make


class _Help(str):
    """The help of an option, with what else is declared of it. The parsers of transformers and TRL hand all other
    metadata of a field to argparse."""

    must: Callable[[str, Any], object] | None = None
    remedy: str = ""


def option(
    default: Any = MISSING,
    help: str | None = None,
    *,
    factory: Any = MISSING,
    must: Callable[[str, Any], object] | None = None,
    remedy: str = "",
    **metadata: Any,
) -> Any:
    """Return a field of a dataclass of options: its default, and the help text that stands beside it.

    Command lines, the reference and the file that shows every key read the text from here. A default that is a list or
    a dict is copied for each instance, and instances have equal hashes whatever it holds.

    Args:
        default: the default. Without it and without ``factory``, the option must be given.
        help: what the option is. Values stand in it as in Python: None, True and False.
        factory: a function that makes the default.
        must: a function of the option's name and its value that raises a ValueError for a wrong one.
        remedy: what else to do where the type refuses the value.
        **metadata: what else a reader of the field is told, such as the option's name on a command line.
    """
    told = {"help": help, **metadata}
    if must is not None or remedy:
        told["help"] = _Help(help)
        told["help"].must, told["help"].remedy = must, remedy
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, hash=False, metadata=told)
    return field(default=default, default_factory=factory, metadata=told)


def must_be_texts(name: str, value: Any) -> None:
    """Check that an option is a list of texts that are not empty.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name}: expected a list of texts that are not empty, got {value!r:.80}")


def must_be_ids(name: str, value: Any) -> None:
    """Check that an option is a token id, or a list of some.

    Raises:
        ValueError: it is something else.
    """
    ids = value if isinstance(value, list | tuple) else [value]
    if value is not None and not (ids and all(isinstance(one, int) and one >= 0 for one in ids)):
        raise ValueError(f"{name}: expected a token id of at least 0, or a list of them, got {value!r:.80}")


def must_be_range(name: str, value: Any) -> None:
    """Check that an option is two finite numbers, the smaller one first.

    Raises:
        ValueError: it is something else.
    """
    ends = list(value) if isinstance(value, list | tuple) else []
    numbers_only = all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
    if len(ends) != 2 or not numbers_only or ends[0] >= ends[1]:
        raise ValueError(f"{name}: expected two numbers, the smaller one first, as [0.0, 1.0], got {value!r:.80}")


def must_be_different(name: str, values: Any) -> None:
    """Check that an option lists at least one thing, and none twice.

    Raises:
        ValueError: it lists none, or one twice.
    """
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name}: expected each once and at least one, got {values!r:.80}")


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


@dataclass(frozen=True)
class Grammar:
    """The grammar that constrains a completion.

    Args:
        text: the grammar as the package ``llguidance`` reads it: JSON with ``grammars``, or Lark's form.
        stop_ids: the token ids that end the completion, in order. They are allowed where the grammar may end.
    """

    text: str
    stop_ids: tuple[int, ...]


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
    keep_states_gib: AboveZero | None = option(
        None,
        "Most GiB of kept KV cache; what does not fit is read again, with equal results. None: half of the free "
        "memory.",
        remedy="keep_states: false keeps nothing",
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
    stop_token_id: TokenIds = option(None, "Stop at this id, or one of these, instead.", must=must_be_ids)
    stop_strings: list[str] | None = option(
        None,
        must=must_be_texts,
        help="End a completion once its text contains one of these strings, whose tokens it keeps (an agent behind an "
        "API leaves the string out).",
    )
    temperature: AboveZero = option(
        0.7,
        "Sampling temperature; log-probabilities are taken at the same one.",
        remedy="greedy play is for evaluation",
    )
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
        must=must_be_range,
    )
    value_sigma: AboveZero = option(
        0.75, "For hl_gauss: the standard deviation of the histogram of a return, in widths of a bin."
    )
    huber_delta: AboveZero = option(10.0, "Error at which the Huber loss turns linear.")
    vf_coef: NotNegative = option(0.1, "Weight of the critic's loss.")
    cliprange_value: NotNegative = option(0.2, "Clip range of the critic's values.")
    target_kl: Finite | None = option(
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
        if self.engine_tis_mode != "token_truncate":
            if self.engine_tis_cap is None:
                raise ValueError(f"engine_tis_mode: {self.engine_tis_mode} needs engine_tis_cap, e.g. 2.0")
            if self.engine_tis_cap <= 1:
                raise ValueError(
                    f"engine_tis_cap: expected a number above 1 for {self.engine_tis_mode}, which trains between 1/cap "
                    f"and cap, got {self.engine_tis_cap}"
                )
        if self.ratio_to == "sampler" and self.engine_tis_cap is not None:
            raise ValueError("ratio_to: sampler and engine_tis_cap both weigh a token by its sampler; set one of them")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coef > 0:
            raise ValueError("kl_in: loss needs kl_estimator k2 or k3, as the gradient of k1 is noise around 0")
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
