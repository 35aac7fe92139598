"""How a policy learns: the section ``advantage``, and an agent's own ``algorithm`` over the sections of the team.

No torch.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator
from typing_extensions import TypedDict

from maporl.sections import Finite, Natural, NotNegative, Share, section
from trl_ext.ppo.options import CriticFreeze, CriticKind, PPOOptions, described, option

Args = TypeVar("Args", bound=PPOOptions)


@section()
class AdvantageTerm:
    """An advantage that is added to that of the section ``advantage``. What is None is that of the section.

    Its return may need no critic, and its baseline may remember nothing.
    """

    weight: Finite = option(1.0, "Weight of this advantage.")
    returns: str | None = option(
        None,
        "As in the section itself. It may need no critic. None, here and below: that of the section.",
    )
    baseline: str | None = option(None, "As in the section itself. It may remember nothing.")
    scale: str | None = option(None, "As in the section itself.")
    key: tuple[str, ...] | None = option(None, "As in the section itself.")
    gamma: Share | None = option(None, "As in the section itself.")
    unit: Literal["row", "rollout", "turn"] | None = option(None, "As in the section itself.")
    singleton: Literal["error", "zero", "raw"] | None = option(None, "As in the section itself.")

    def within(self, section: "AdvantageConfig") -> "AdvantageConfig":
        """Return the configuration of this advantage alone."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "weight"}
        changes = {name: value for name, value in named.items() if value is not None}
        return dataclasses.replace(section, post=(), plus=(), **changes)


@section()
class AdvantageConfig:
    """How credits become advantages: a return, a baseline, a scale and transforms, over rows grouped by ``key``.

    The slots are in ``maporl.advantages``: RETURNS, BASELINES, SCALES and TRANSFORMS.
    """

    returns: str = option(
        "token_gae",
        "The return of a row. There is one number per token with token_gae (PPO), token_chain_gae (through the "
        "answers of a dialogue), token_agent_gae (through those of an agent in it) and bi_level_gae (over an agent's "
        "turns with gamma and lam of this section, and within each of them with those of ppo), and one per utterance "
        "with all others.",
    )
    baseline: str = option(
        "critic",
        "What is subtracted from the return: critic or none with a return per token, critic with turn_gae and "
        "chain_gae, and any with the others.",
    )
    scale: str = option("std", "What the difference is divided by.")
    key: tuple[str, ...] = option(
        ("agent", "turn"),
        "The columns that make a group: prompt, rollout, agent, role, turn, order, parent, action; also caller, "
        "game, seed and state if they are recorded. [prompt] is GRPO, [prompt, agent] is Dr. MAS, [prompt, agent, "
        "turn] is AT-GRPO.",
    )
    post: tuple[str | dict[str, dict[str, Any]], ...] = option(
        (),
        "Transforms, applied in order. Each is a name or {name: options}.",
    )
    gamma: Share = option(1.0, "Discount per utterance (ppo.gamma is the discount per token).")
    lam: Share = option(0.95, "Lambda of GAE per utterance (ppo.lam is the lambda per token).")
    ddof: Literal[0, 1] = option(1, "1: the unbiased standard deviation. 0: that of the population.")
    eps: NotNegative = option(1e-6, "Number that is added to the standard deviation.")
    ema: Share = option(0.95, "Share of its running mean that the baseline ema keeps in each update.")
    unit: Literal["row", "rollout", "turn"] = option(
        "row",
        "What counts once in a statistic: a row, or a rollout or a turn (by the mean of its rows). A turn in "
        "which an agent called tools has several rows.",
    )
    singleton: Literal["error", "zero", "raw"] = option(
        "error",
        "What happens to a group of one row: error stops the run, zero sets its advantage to 0, raw keeps its "
        "return as GiGPO's outcomes and RLAnything's last steps do.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "sum_then_normalize compares the weighted sum of the reward sources. normalize_then_sum compares each "
        "alone and adds the weighted results (GDPO, arXiv 2601.05242). The names are TRL's.",
    )
    plus: tuple[AdvantageTerm, ...] = option(
        (),
        "Further advantages that are added before the transforms, as {weight: 1.0, returns: reward_to_go, key: "
        "[prompt, state]} (GiGPO, arXiv 2505.10978).",
    )
    alpha: Share = option(
        1.0,
        "For the baseline assisted: the weight of what the critic expects of the other rows, beside their returns.",
    )


_OF_SAMPLING = "agents.NAME.sampling says how one agent is sampled, and ppo how all are"
_OF_RUN = "set it in the section ppo, because it is of the whole run"
NOT_LEARNED = {
    "total_episodes": "updates sets the length of a run",
    **dict.fromkeys(("temperature", "top_p", "top_k", "response_length"), _OF_SAMPLING),
    **dict.fromkeys(("stop_token", "stop_token_id", "stop_strings"), _OF_SAMPLING),
    **dict.fromkeys(("local_rollout_forward_batch_size", "max_tokens_per_generate", "keep_states"), _OF_RUN),
    **dict.fromkeys(("keep_states_gib", "max_tokens_per_microbatch", "logits_chunk", "missing_eos_penalty"), _OF_RUN),
}
"""The options of PPO that no policy has of its own, and where they stand."""


def _own(value: Any) -> Any:
    """Return the keys of a whole section that Python made, and refuse options of sampling and of the run."""
    keys = vars(value) if dataclasses.is_dataclass(value) else value
    for name in keys if isinstance(keys, Mapping) else ():
        if name in NOT_LEARNED:
            raise ValueError(f"{name}: belongs to no single policy: {NOT_LEARNED[name]}")
    return keys


def _part(kind: type, without: Mapping[str, str]) -> Any:
    """Return the type of a mapping with some of the options of ``kind``, which are those that an algorithm sets."""
    hints = {f.name: f.type for f in dataclasses.fields(kind) if f.name not in without}
    part = TypedDict(f"{kind.__name__}OfOne", hints, total=False)  # type: ignore[misc]  # its keys are those of kind
    shown: Any = {"extra": "forbid", "json_schema_extra": lambda schema: described(schema, kind)}
    part.__pydantic_config__ = shown  # type: ignore[attr-defined]
    part.__options_of__ = kind  # type: ignore[attr-defined]  # messages name its keys
    return Annotated[part, BeforeValidator(_own)]


@section()
class Algorithm:
    """The algorithm of one agent's policy. Keys that it leaves out are those of the team's sections.

    Agents that share a policy have one algorithm, but each may have its own ``advantage``, which belongs to what it
    says.
    """

    advantage: _part(AdvantageConfig, {}) = option(  # type: ignore[valid-type]
        {}, "Options of the section advantage, for what this agent says."
    )
    ppo: _part(PPOOptions, NOT_LEARNED) = option(  # type: ignore[valid-type]
        {},
        "Options of the section ppo but those of sampling and of the run: the loss, the KL, passes and minibatches.",
    )
    critic: CriticKind | None = option(None, "As training.critic, of which None, here and below, takes the value.")
    critic_freeze: CriticFreeze | None = option(None, "As training.critic_freeze.")
    critic_per_turn: bool | None = option(None, "As training.critic_per_turn.")
    critic_context: Literal["dialogue", "answer", "joint"] | None = option(None, "As training.critic_context.")
    detach_critic: bool | None = option(None, "As training.detach_critic.")
    learning_rate: NotNegative | None = option(None, "As training.learning_rate.")
    value_learning_rate: NotNegative | None = option(None, "As training.value_learning_rate.")
    lr_scheduler_type: str | None = option(None, "As training.lr_scheduler_type.")
    lr_scheduler_kwargs: dict[str, Any] | None = option(None, "As training.lr_scheduler_kwargs.")
    warmup_steps: NotNegative | None = option(None, "As training.warmup_steps.")
    max_grad_norm: NotNegative | None = option(None, "As training.max_grad_norm.")
    weight_decay: NotNegative | None = option(None, "As training.weight_decay.")
    adam_beta2: Share | None = option(None, "As training.adam_beta2.")
    critic_warmup: Natural | None = option(None, "As schedule.critic_warmup.")

    @property
    def of_learner(self) -> dict[str, Any]:
        """The options of ``training`` that are set, by name."""
        return {name: value for name in OF_LEARNER if (value := getattr(self, name)) is not None}

    @property
    def of_policy(self) -> dict[str, Any]:
        """All that is set but the advantage, which agents that share a policy have in common."""
        warmup = {} if self.critic_warmup is None else {"critic_warmup": self.critic_warmup}
        return self.ppo | self.of_learner | warmup

    def with_defaults(self, **values: Any) -> "Algorithm":
        """Return the algorithm with ``values`` for keys that it leaves out.

        Raises:
            ValueError: it sets one of them to something else.
        """
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():
            if getattr(self, name) not in (None, value):
                other = f"algorithm.{name}: {getattr(self, name)!r}"
                raise ValueError(f"{name}: {value!r} and {other} differ; remove one of them")
        return dataclasses.replace(self, **given) if given else self

    def arguments(self, args: Args) -> Args:
        """Return the arguments of a policy's learner: those of the trainer, ``args``, with this algorithm's options.

        Raises:
            ValueError: two options exclude each other.
        """
        if not self.of_policy:
            return args
        own = copy.copy(args)
        vars(own).update(self.of_policy)
        PPOOptions.__post_init__(own)
        return own

    def advantages(self, team: AdvantageConfig) -> AdvantageConfig:
        """Return how the credits of this agent become advantages: as the ``team``'s do but for this algorithm's
        options."""
        return dataclasses.replace(team, **self.advantage) if self.advantage else team


def alike(learns: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of those that have equal values, such as algorithms, in order of first appearance."""
    names: dict[str, list[str]] = {}
    for name, own in learns.items():
        names.setdefault(str(own), []).append(name)
    return [*names.values()]


OF_TEAM = Algorithm()
"""The algorithm of who has none of its own."""
OF_LEARNER = tuple(f.name for f in dataclasses.fields(Algorithm) if f.name not in ("advantage", "ppo", "critic_warmup"))
"""The options of ``training`` that a policy may have of its own."""
OF_CENTRAL = (
    *("value_learning_rate", "critic_freeze", "critic_per_turn", "critic_updates", "max_grad_norm"),
    *("weight_decay", "adam_beta2", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("value_loss", "value_bins", "value_range", "value_sigma"),
)
"""The options that policies with one central critic have in common."""
