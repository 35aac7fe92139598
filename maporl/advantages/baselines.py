"""Baselines: the number that is subtracted from a return.

Every baseline is a function ``(returns, groups, weights, batch, config, state) -> [N]``. ``returns`` [N] has one
number for each row. ``groups`` lists the row numbers of each group. ``weights`` [N] says how often a row counts in a
statistic; 0 means not at all. ``state`` is what a baseline remembers between updates.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.returns import return_of
from maporl.advantages.slots import Baseline, find
from maporl.config.schema import AdvantageConfig
from maporl.rounding import tolerance

Groups = list[list[int]]


@dataclass
class BaselineState:
    """What baselines remember between updates: a running mean for each key. Checkpoints contain it."""

    means: dict[str, float] = field(default_factory=dict)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum(w x) / sum(w)``.

    If all values with a positive weight are equal, the result is exactly that value. Rounding would otherwise give
    equal rows a tiny advantage.
    """
    counted = values[weights > 0]
    if len(counted) and bool((counted == counted[0]).all()):
        return counted[0]
    return (values * weights).sum() / weights.sum()


def without_rounding(differences: Tensor, values: Tensor) -> Tensor:
    """Return ``differences`` [N] of ``values`` [N] and their mean, or another of them, with exact zeros where only
    rounding is left."""
    if not len(values):
        return differences
    return torch.where(differences.abs() < tolerance(float(values.abs().max())), 0.0, differences)


def all_equal(values: Tensor) -> bool:
    """Return whether ``values`` [N] are equal but for rounding."""
    return not bool(without_rounding(values - values.mean(), values).any())


def none(returns, groups, weights, batch, config, state) -> Tensor:
    """Return 0 for every row."""
    return torch.zeros_like(returns)


def mean(returns: Tensor, groups: Groups, weights: Tensor, batch, config, state) -> Tensor:
    """Return the mean of the group (GRPO, arXiv 2402.03300)."""
    base = torch.zeros_like(returns)
    for rows in groups:
        base[rows] = weighted_mean(returns[rows], weights[rows])
    return base


def leave_one_out(returns: Tensor, groups: Groups, weights: Tensor, batch, config, state) -> Tensor:
    """Return the mean of the *other* rows of the group (RLOO, arXiv 2402.14740)."""
    base = torch.zeros_like(returns)
    for rows in groups:
        values, shares = returns[rows], weights[rows]
        total, count = (values * shares).sum(), shares.sum()
        base[rows] = (total - values) / (count - 1).clamp(min=1e-12)
        if bool((values == values[0]).all()):
            base[rows] = values
    return base


def largest(returns: Tensor, groups: Groups, weights: Tensor, batch, config, state) -> Tensor:
    """Return the largest return of the group."""
    base = torch.zeros_like(returns)
    for rows in groups:
        base[rows] = returns[rows][weights[rows] > 0].max()
    return base


def batch_mean(returns: Tensor, groups, weights: Tensor, batch: TurnBatch, config, state) -> Tensor:
    """Return the mean of the whole batch."""
    return torch.full_like(returns, float(weighted_mean(returns[batch.rows()], weights[batch.rows()])))


def ema(
    returns: Tensor, groups: Groups, weights, batch: TurnBatch, config: AdvantageConfig, state: BaselineState
) -> Tensor:
    """Return a running mean for each key (SPIRAL, arXiv 2506.24119).

    The mean starts at 0. Each dialogue reads it first and then updates it: ``b <- ema b + (1 - ema) R``, where R is the
    mean return of the dialogue's rows with this key. Dialogues do this one after another: in the order of their numbers
    (``prompt``, and in it ``rollout``), or in the order of the rows where these are not numbers.

    Raises:
        ValueError: no recorded column tells one dialogue from another.
    """
    if not batch.dialogues():
        raise ValueError(
            "baseline: ema needs the column 'rollout' (or prompt, game or seed): dialogues move the running mean one "
            f"after another, and nothing tells them apart; there are {batch.recorded()}"
        )
    base = torch.zeros_like(returns)
    columns = [batch.column(name, "key") for name in config.key]
    numbers = [c for c in (batch.prompt, batch.rollout) if c is not None and all(isinstance(n, int) for n in c)]
    groups = batch.groups((*config.key, *batch.dialogues()))
    for rows in sorted(groups, key=lambda rows: [column[rows[0]] for column in numbers]):
        key = "/".join(str(column[rows[0]]) for column in columns)
        before = state.means.get(key, 0.0)
        base[rows] = before
        state.means[key] = config.ema * before + (1 - config.ema) * float(returns[rows].mean())
    return base


def critic(returns: Tensor, groups, weights, batch: TurnBatch, config: AdvantageConfig, state) -> Tensor:
    """Return the critic's value of the state before the utterance.

    The result is 0 if the return needs a critic too, because such a return has the value subtracted already.

    Raises:
        ValueError: the batch has no values.
    """
    if return_of(config).needs_critic:
        return torch.zeros_like(returns)
    if batch.value is None:
        raise ValueError("baseline: critic needs the column 'value', which the batch lacks")
    return batch.tensor(batch.value)


def assisted(
    returns: Tensor, groups: Groups, weights: Tensor, batch: TurnBatch, config: AdvantageConfig, state
) -> Tensor:
    """Return the mean of what is known of the *other* rows of the group: returns, and what a critic expects of them.

    It is ``(1 - alpha) loo(R) + alpha loo(Q)``, where Q is the critic's value when the utterance has been said (C3,
    arXiv 2603.06859, ``value_assisted``). With ``alpha`` 1 an utterance that the critic overrates lowers the others. A
    scale then raises it above them: its advantage is that of ``R + Q / (n - 1)`` among n rows.

    Raises:
        ValueError: the batch has no values.
    """
    if batch.value is None:
        raise ValueError("baseline: assisted needs the column 'value', which the batch lacks")
    observed = leave_one_out(returns, groups, weights, batch, config, state)
    expected = leave_one_out(batch.tensor(batch.value), groups, weights, batch, config, state)
    return (1 - config.alpha) * observed + config.alpha * expected


BASELINES: dict[str, Any] = {
    "none": Baseline(none),
    "mean": Baseline(mean, over="group"),
    "loo": Baseline(leave_one_out, over="group", scales_mean=True),
    "max": Baseline(largest, over="group"),
    "batch_mean": Baseline(batch_mean, over="batch"),
    "ema": Baseline(ema, remembers=True),
    "critic": Baseline(critic, needs_critic=True),
    "assisted": Baseline(assisted, over="group", needs_critic=True, reads_after=True),
}


def baseline_of(config: AdvantageConfig, where: str = "baseline") -> Baseline:
    """Return the baseline that a configuration names.

    Raises:
        ValueError: the name is unknown.
    """
    return find(BASELINES, Baseline, config.baseline, where)
