"""Check that no advantage is noise that was divided by its own spread.

A scale over a group makes the spread of the group 1. That is what it is for where rewards differ. Where all answers of a
question earn the same, it must find no difference: a KL penalty or the error of a critic differs a little from row to row, and
would become advantages of 1 and -1. Configurations are checked before a model loads, and a trainer checks what it is given.
"""

from collections.abc import Iterator

from maporl.advantages.baselines import baseline_of
from maporl.advantages.scales import scale_of
from maporl.config.schema import AdvantageConfig
from maporl.errors import ConfigError
from trl_ext.ppo_options import PPOOptions

OF_A_QUESTION = frozenset({"prompt", "rollout", "parent", "caller", "state", "seed"})
"""A group with one of these columns in its key is a part of one question, in which all rewards are often equal."""


def check_scaled_noise(advantage: AdvantageConfig, ppo: PPOOptions, where: str) -> None:
    """Check that neither the KL nor a critic's error is divided by its own spread in the groups of a question.

    Raises:
        ConfigError: the KL is part of rewards that are scaled within a question, or a critic's values are. The message begins
            with ``where`` and has the remedies.
    """
    in_reward = ppo.kl_coef != 0 and ppo.kl_in == "reward"
    for place, config in _terms(advantage):
        baseline, scale = baseline_of(config), scale_of(config)
        of_a_question = sorted(OF_A_QUESTION.intersection(config.key))
        if scale.over != "group" or not of_a_question:
            continue
        if in_reward:
            raise ConfigError(
                f"{where}: {place}: scale {config.scale} divides by the spread of each group by {list(config.key)}, and ppo.kl_in: reward "
                f"has made the KL (kl_coef {ppo.kl_coef:g}) a part of what is compared. Where all answers of a group earn the same, "
                "only the KL differs, and its noise would become advantages of 1 and -1; set ppo.kl_in: loss with ppo.kl_estimator: "
                f"k3, or {place}.scale: none"
            )
        if baseline.needs_critic and baseline.over != "group":
            raise ConfigError(
                f"{where}: {place}: scale {config.scale} divides by the spread of each group by {list(config.key)}, and baseline "
                f"{config.baseline} leaves the critic's error. Where all answers of a question earn the same, only this error differs, and "
                f"would become advantages of 1 and -1; leave {', '.join(of_a_question)} out of {place}.key, or set {place}.scale: none"
            )


def _terms(advantage: AdvantageConfig) -> Iterator[tuple[str, AdvantageConfig]]:
    """Yield the advantage and each of the terms that are added to it, with their places in a configuration."""
    yield "advantage", advantage
    for number, term in enumerate(advantage.plus):
        yield f"advantage.plus.{number}", term.within(advantage)
