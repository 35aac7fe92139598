"""Check that no advantage is noise that was divided by its own spread.

A scale over a group makes the spread of the group 1. That is what it is for where rewards differ. Where all answers of
a question earn the same, it must find no difference: a KL penalty or the error of a critic differs a little from row to
row, and would become advantages of 1 and -1. Configurations are checked before a model loads, and a trainer checks what
it is given.
"""

from collections.abc import Iterator, Sequence

from maporl.advantages.baselines import baseline_of
from maporl.advantages.scales import scale_of
from maporl.advantages.transforms import Whiten, build_transforms
from maporl.config.schema import AdvantageConfig
from maporl.errors import Fault
from trl_ext.ppo.options import PPOOptions

OF_A_QUESTION = frozenset({"prompt", "rollout", "parent", "caller", "state", "seed"})
"""A group with one of these columns in its key is a part of one question, in which all rewards are often equal."""


def faults(advantage: AdvantageConfig, ppo: PPOOptions) -> Iterator[Fault]:
    """Yield a KL or a critic's error that would be divided by its own spread in the groups of a question.

    The KL is part of rewards that are scaled within a question, or a critic's values are; or the KL is both in the loss
    and in the advantage.
    """
    in_reward = ppo.kl_coef != 0 and ppo.kl_in == "reward"
    for place, divides, remedy, config, key in _scaled_groups(advantage):
        of_a_question = sorted(OF_A_QUESTION.intersection(key))
        if not of_a_question:
            continue
        baseline = baseline_of(config)
        if in_reward:
            what = (
                f"{divides} divides by the spread of each group by {list(key)}, and ppo.kl_in: reward has made the KL "
                f"(kl_coef {ppo.kl_coef:g}) a part of what is compared. Where all answers of a group earn the same, "
                "only the KL differs, and its noise would become advantages of 1 and -1"
            )
            yield Fault(place, what, f"set ppo.kl_in: loss with ppo.kl_estimator: k3, or {remedy}")
        if baseline.needs_critic and (baseline.over != "group" or divides == "whiten"):
            what = (
                f"{divides} divides by the spread of each group by {list(key)}, and baseline {config.baseline} leaves "
                "the critic's error. Where all answers of a question earn the same, only this error differs, and "
                "would become advantages of 1 and -1"
            )
            yield Fault(place, what, f"leave {', '.join(of_a_question)} out of the key, or {remedy}")
    transforms = build_transforms(advantage)
    if ppo.kl_coef != 0 and ppo.kl_in == "loss" and any(transform.per_token for transform in transforms):
        what = f"cumulative_kl takes the KL (kl_coef {ppo.kl_coef:g}) off advantages, and ppo.kl_in: loss adds it too"
        yield Fault("advantage.post", what, "set ppo.kl_in: reward, or leave cumulative_kl out")


def _scaled_groups(
    advantage: AdvantageConfig,
) -> Iterator[tuple[str, str, str, AdvantageConfig, Sequence[str]]]:
    """Yield what is divided by a group's spread: its place, the divisor, how to omit it, the advantage, the key."""
    terms = [
        ("advantage", advantage),
        *((f"advantage.plus.{n}", t.within(advantage)) for n, t in enumerate(advantage.plus)),
    ]
    for place, config in terms:
        if scale_of(config).over == "group":
            yield place, f"scale {config.scale}", f"{place}.scale: none", config, config.key
    for transform in build_transforms(advantage):
        if isinstance(transform, Whiten):
            yield "advantage.post", "whiten", "leave whiten out", advantage, transform.key
