"""Check that rewards can be compared apart (``multi_objective_aggregation: normalize_then_sum``). Imports no torch.

What an utterance earns must then be the weighted sum of its own rewards. Configurations are checked before a model loads, a
trainer checks the parts that it is given, and rows are checked when they are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from maporl.config.schema import AdvantageConfig, RewardSection
from maporl.errors import ConfigError
from trl_ext.ppo.options import PPOOptions

if TYPE_CHECKING:
    from maporl.advantages.batch import TurnBatch


def check_rewards_apart(advantage: AdvantageConfig, reward: RewardSection, ppo: PPOOptions, where: str) -> None:
    """Check that each utterance is credited with the weighted sum of its own rewards, if these are compared apart.

    Raises:
        ConfigError: ``normalize_then_sum`` meets an option that changes the sum.
    """
    if advantage.multi_objective_aggregation != "normalize_then_sum":
        return
    changes = {
        "reward.rules other than own": [entry for entry in reward.rules if entry != "own"],
        "reward.share: all": not reward.rules and reward.share == "all",
        f"reward.horizon: {reward.horizon}": not reward.rules and reward.horizon != "current",
        "reward.bonus": reward.bonus,
        "reward.penalties": reward.penalties,
        "ppo.missing_eos_penalty": ppo.missing_eos_penalty,
        "ppo.kl_coef with kl_in: reward": ppo.kl_coef != 0 and ppo.kl_in == "reward",
    }
    found = [name for name, value in changes.items() if value]
    if found:
        raise ConfigError(
            f"{where}: advantage.multi_objective_aggregation: normalize_then_sum compares each of {list(reward.sources)} alone, but "
            f"{found[0]} changes their sum; set reward.rules: [own] and leave that out"
        )
    if len([weight for weight in reward.sources.values() if weight]) < 2:
        raise ConfigError(
            f"{where}: advantage.multi_objective_aggregation: normalize_then_sum needs two rewards with a weight, got "
            f"reward.sources {reward.sources}; add one, or remove it"
        )


def must_be_sums(batch: TurnBatch) -> None:
    """Check that what each row earned is the weighted sum of its own rewards, if these are compared apart.

    Raises:
        ConfigError: a row earned something else, such as the mean of what its readers earned.
    """
    parts, weights = batch.parts or {}, batch.part_weights or {}
    for i in batch.rows() if parts else []:
        own = sum(weights.get(name, 1.0) * (values[i] or 0.0) for name, values in parts.items())
        if abs(own - batch.reward[i]) > 1e-5 * max(1.0, abs(own)):
            raise ConfigError(
                "advantage.multi_objective_aggregation: normalize_then_sum compares each reward of an utterance alone, but an "
                f"utterance of agent {(batch.agent or ['?'])[i]!r} with the rewards { ({n: v[i] for n, v in parts.items()}) } is "
                f"credited with {batch.reward[i]:g} and not with their weighted sum {own:g}; set sum_then_normalize"
            )
