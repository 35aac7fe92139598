"""``estimate`` computes advantages: a return, a baseline, a scale and transforms, over rows that share a key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maporl.advantages.baselines import BaselineState, Groups, all_equal, baseline_of, without_rounding
from maporl.advantages.batch import TurnBatch
from maporl.advantages.returns import RETURNS, return_of
from maporl.advantages.scales import scale_of
from maporl.advantages.slots import Return, find, numbers_of
from maporl.advantages.transforms import Transform, build_transforms
from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig
from maporl.errors import UserError


class GroupOfOne(UserError, ValueError):
    """A row has no other row in its group to be compared with. The message names the group."""


@dataclass
class Estimates:
    """Three numbers for each row, [N]: the advantage, the target of the critic, and the row's weight in the loss.

    A weight of 0 leaves the row out of the loss.
    """

    advantages: Tensor
    targets: Tensor
    weights: Tensor


def estimate(batch: TurnBatch, config: AdvantageConfig, state: BaselineState | None = None) -> Tensor:
    """Return the advantage of every row, float32 [N]; 0 at padding.

    The baseline is subtracted from the return of a row (``config.returns``), the result is divided by the scale, and
    then the transforms are applied. A row is compared with the rows that have the same ``config.key``: ``(prompt,)`` is
    GRPO, ``(prompt, agent)`` is Dr. MAS, and ``(prompt, agent, turn)`` is AT-GRPO. If all rows of a group are equal,
    they get exactly 0. ``state`` is what the baseline ``ema`` remembers.

    >>> batch = TurnBatch(reward=[1, 0, 0, 1], prompt=["q"] * 4, agent=["a", "a", "b", "b"])
    >>> estimate(batch, AdvantageConfig(returns="utterance", baseline="mean", scale="none", key=("prompt",))).tolist()
    [0.5, -0.5, -0.5, 0.5]

    Raises:
        ValueError: a slot has no such name, or a column or a value that it needs was not recorded.
        GroupOfOne: a group has a single member.
    """
    return estimate_all(batch, config, state).advantages.float()


def estimate_all(
    batch: TurnBatch, config: AdvantageConfig, state: BaselineState | None = None, scaled: bool = True
) -> Estimates:
    """Return what :func:`estimate` returns, in float64, and the other numbers that training needs.

    ``scaled=False`` leaves out the scale and the transforms.

    Raises:
        ValueError: as for :func:`estimate`; or the return runs over tokens.
        ConfigError: a slot or a transform fails, or returns anything but one finite number for each row. The message
            names it.
    """
    slot = return_of(config)
    if slot.compute is None:
        others = [name for name in RETURNS if not find(RETURNS, Return, name, "returns").per_token]
        raise ValueError(
            f"returns: {config.returns} runs over tokens, so estimate() has no number for a row; use "
            f"trl_ext.ppo.maths.gae, or one of {', '.join(others)}"
        )
    transforms = build_transforms(config)
    weights = torch.zeros(len(batch), dtype=torch.float64)
    weights[batch.rows()] = 1.0
    post = [(f"advantage.post: {entry_name(e)}", t) for e, t in zip(config.post, transforms, strict=True)]
    for where, transform in post:
        weights = weights * numbers_of(f"{where}: weigh", transform.weigh, batch, like=weights)
    compared = _compare(batch, config, weights, state or BaselineState())
    values = batch.tensor(batch.value) if batch.value is not None else torch.zeros_like(compared.returns)
    targets = compared.returns + values if slot.needs_critic else compared.returns
    if not scaled:
        return Estimates(compared.raw, targets, weights)
    advantages = compared.finite(config)
    if config.multi_objective_aggregation == "normalize_then_sum":
        advantages = _each_reward_alone(batch, config, weights)
    for term in config.plus:
        section = term.within(config)
        advantages = advantages + term.weight * _compare(batch, section, weights, BaselineState()).finite(section)
    for where, transform in post:
        advantages = numbers_of(f"{where}: apply", transform.apply, advantages, batch, config, like=advantages)
    for where, transform in post:
        weights = numbers_of(f"{where}: weigh_after", transform.weigh_after, advantages, weights, batch, like=weights)
    return Estimates(advantages, targets, _loss_weights(batch, transforms, weights))


@dataclass
class _Compared:
    """Of each row: its return, the return minus the baseline, and that divided by the scale."""

    returns: Tensor
    raw: Tensor
    advantages: Tensor

    def finite(self, config: AdvantageConfig) -> Tensor:
        """Return the advantages.

        Raises:
            ConfigError: one is not finite. The message names the slot that made it.
        """
        wrong = ~self.advantages.isfinite()
        made = {"returns": self.returns, "baseline": self.raw, "scale": self.advantages} if bool(wrong.any()) else {}
        for slot, values in made.items():
            numbers_of(f"advantage.{slot}: {getattr(config, slot)}", torch.where, wrong, values, 0.0, like=values)
        return self.advantages


def _compare(batch: TurnBatch, config: AdvantageConfig, weights: Tensor, state: BaselineState) -> _Compared:
    """Compare the returns of rows with those of their groups. Rows without a ``weight`` get 0."""
    baseline, scale, compute = baseline_of(config), scale_of(config), return_of(config).compute
    assert compute is not None  # estimate_all, and the check of the configuration, refuse returns over tokens
    returns = numbers_of(f"advantage.returns: {config.returns}", compute, batch, config, like=weights, finite=False)
    groups, statistics = batch.groups(config.key), weights
    if config.unit != "row":
        returns, statistics = _by_unit(batch, config, returns, weights)
    lone = _groups_of_one(batch, config, groups, statistics)
    counted = [rows for rows in groups if bool((statistics[rows] > 0).any())]
    where, given = "advantage.baseline: " + config.baseline, (counted, statistics, batch, config)
    # a copy, because a function may write into what it is given
    raw = returns - numbers_of(where, baseline.compute, returns.clone(), *given, state, like=returns, finite=False)
    for rows in counted if baseline.over == "group" else [batch.rows()]:
        raw[rows] = without_rounding(raw[rows], returns[rows])
    if baseline.over == "group" and baseline.needs_critic and scale.over != "nothing":
        # of equal returns only the critic's error is left, which would be divided by its own spread
        for rows in counted:
            if all_equal(returns[[i for i in rows if statistics[i] > 0]]):
                raw[rows] = 0.0
    where = "advantage.scale: " + config.scale
    advantages = numbers_of(where, scale.compute, raw, returns.clone(), *given, like=raw, finite=False)
    if baseline.over == "group" and not baseline.needs_critic:
        for rows in counted:
            weighted = [i for i in rows if statistics[i] > 0]
            if not bool(raw[weighted].any()):
                advantages[rows] = 0.0
    advantages[lone] = returns[lone] if config.singleton == "raw" else 0.0
    advantages[weights == 0] = 0.0
    return _Compared(returns, raw, advantages)


def _each_reward_alone(batch: TurnBatch, config: AdvantageConfig, weights: Tensor) -> Tensor:
    """Return the weighted sum of the advantages that each of the rewards would have alone."""
    if not batch.parts:
        raise ValueError("multi_objective_aggregation: normalize_then_sum needs TurnBatch.parts, which is None")
    total = torch.zeros(len(batch), dtype=torch.float64)
    for name, values in batch.parts.items():
        present = torch.tensor([value is not None for value in values])
        rewards = [0.0 if value is None else value for value in values]
        alone = replace(batch, reward=rewards, parts=None)
        advantages = _compare(alone, config, weights * present, BaselineState()).finite(config)
        total += (batch.part_weights or {}).get(name, 1.0) * advantages
    return total


def check_columns(config: AdvantageConfig, recorded: Sequence[str], where: str = "advantage") -> None:
    """Check that every slot of ``config`` exists and needs only the ``recorded`` columns.

    Raises:
        ValueError: a slot has no such name, or it needs a column that is not recorded, or its ``needs`` is one text.
    """
    baseline_of(config, f"{where}.baseline")
    wanted = [
        (f"{where}.returns: {config.returns}", return_of(config, f"{where}.returns").needs),
        (f"{where}.key:", config.key),
        (f"{where}.scale: {config.scale}", scale_of(config, f"{where}.scale").needs),
    ]
    for entry, transform in zip(config.post, build_transforms(config, where), strict=True):
        wanted.append((f"{where}.post: {entry_name(entry)}", transform.needs))
    for number, term in enumerate(config.plus):
        check_columns(term.within(config), recorded, f"{where}.plus.{number}")
    for who, columns in wanted:
        if isinstance(columns, str):
            raise ValueError(f"{who}: its needs are a tuple of columns, as ({columns!r},), got {columns!r}")
        for name in columns:
            if name not in recorded:
                raise ValueError(f"{who} names the column {name!r}, which is not recorded; there are {list(recorded)}")


def _by_unit(batch: TurnBatch, config: AdvantageConfig, returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Give every row the mean return of its unit's rows in its group, and let each unit count once."""
    # a turn counts as often as a transform lets its rows count
    columns = {"rollout": ("rollout",), "turn": ("rollout", "agent", "turn")}[config.unit]
    for name in columns:
        batch.column(name, f"unit: {config.unit}")
    returns, shares = returns.clone(), weights.clone()
    for rows in batch.groups((*config.key, *batch.dialogues(), *columns)):
        weighted = [i for i in rows if weights[i] > 0]
        if weighted:
            returns[rows] = returns[weighted].mean()
            shares[weighted] = (weights[weighted] if config.unit == "turn" else 1.0) / len(weighted)
    return returns, shares


def _groups_of_one(batch: TurnBatch, config: AdvantageConfig, groups: Groups, weights: Tensor) -> list[int]:
    """Return the rows that have no other row in their group to be compared with, unless these are an error."""
    over = {baseline_of(config).over, scale_of(config).over}
    compared: Groups = list(groups) if "group" in over else []
    if "agent" in over:
        compared += batch.groups(("agent",), f"scale: {config.scale}")
    if "batch" in over:
        compared.append(batch.rows())
    alone = [rows for rows in compared if 0 < float(weights[rows].sum()) < 1.5]
    if alone and config.singleton == "error":
        columns = {name: getattr(batch, name)[alone[0][0]] for name in config.key}
        columns |= {"turn": columns["turn"] + 1} if "turn" in columns else {}  # people count turns from 1
        raise GroupOfOne(
            f"advantage: the group {columns} has a single member, so there is nothing to compare it with (baseline "
            f"{config.baseline!r}, scale {config.scale!r}, key {list(config.key)}); sample more answers per group "
            "(branching.group), leave columns out of advantage.key, or set advantage.singleton: zero (such rows get "
            "0) or raw."
        )
    return [i for rows in alone for i in rows]


def _loss_weights(batch: TurnBatch, transforms: list[Transform], weights: Tensor) -> Tensor:
    """Return the weights in the loss: 1 for called utterances if a transform trains on them."""
    if any(transform.trains_callees for transform in transforms):
        called = torch.tensor([batch.called(i) for i in range(len(batch))])
        return torch.where(called, 1.0, weights)
    return weights
