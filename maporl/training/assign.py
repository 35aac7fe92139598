"""From token batches of all policies to their advantages, whichever slots the configuration names: numbers to numbers."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from maporl.advantages.baselines import BaselineState
from maporl.advantages.batch import TurnBatch
from maporl.advantages.estimator import Estimates, estimate_all
from maporl.advantages.returns import TOKEN_RETURNS
from maporl.advantages.transforms import Transform, build_transforms
from maporl.config.schema import AdvantageConfig
from maporl.training.samples import Columns, credited_by_nobody_else
from maporl.training.update_batch import TeamUpdateBatch
from trl_ext import distributed, maths
from trl_ext.learning import Learning
from trl_ext.metrics import Metrics
from trl_ext.ppo_options import PPOOptions
from trl_ext.token_advantages import row_metrics, token_gae, token_kl, token_rewards, whiten_groups
from trl_ext.token_batch import GlobalBatch, TokenBatch

Row = tuple[str, int]
"""A policy, and a row of its token batch."""


class Advantages:
    """Works out the advantages of an update, over what all processes sampled.

    Args:
        config: return, baseline, scale, transforms and key.
        options: PPO's discount, lambda, KL coefficient and aggregation.
        critics: the policies that have a critic.
    """

    def __init__(self, config: AdvantageConfig, options: PPOOptions, critics: Collection[str] = ()):
        self.config, self.options, self.critics = config, options, frozenset(critics)
        self.transforms: list[Transform] = build_transforms(config)
        self.state = BaselineState()

    def assign(
        self, batches: dict[str, TokenBatch], columns: Mapping[str, Sequence[Columns]], others: Sequence[Columns] = ()
    ) -> tuple[dict[str, Metrics], dict[str, Tensor]]:
        """Fill in ``advantages``, ``returns`` and ``weight`` of token batches whose old log-probabilities and values are known.

        Args:
            batches: by policy, the rows of all processes.
            columns: by policy, those of each row, in the same order.
            others: those of utterances that nobody learns from, where a transform needs everybody.

        Returns:
            Statistics by policy; and by policy the numbers of the rows that count, without policies that have none.

        Raises:
            ValueError: a group has a single member, or a column that is needed was not recorded.
        """
        if not batches:
            return {}, {}
        rows = [(policy, number) for policy, own in columns.items() for number in range(len(own))]
        known = [one for own in columns.values() for one in own]
        if self.config.returns in TOKEN_RETURNS:
            self._number_groups(batches, rows, known)
            self._over_tokens(batches, rows, known)
            metrics = {name: row_metrics(own, self.options) for name, own in batches.items()}
            if self.config.scale != "none":
                whiten_groups(list(batches.values()))
        else:
            self._over_rows(batches, rows, [*known, *others])
            metrics = {name: row_metrics(own, self.options) for name, own in batches.items()}
        if self.options.aggregation == "per_main_rollout":
            for name, own in columns.items():
                batches[name].weight *= len(own) / len({(c.prompt, c.rollout) for c in own})
        counting = {name: own.weight.nonzero().flatten() for name, own in batches.items()}
        return metrics, {name: index for name, index in counting.items() if len(index)}

    def fill(
        self, batch: TeamUpdateBatch, learning: Learning, together: torch.device | None = None
    ) -> dict[str, Metrics]:
        """Fill in the token batches of ``batch`` from its samples, with advantages over what all processes sampled.

        Of other processes come columns and token rows, no dialogues. ``together``: the device where rows of several devices meet.
        All processes call this together. Returns statistics by policy.
        """
        own = {name: [sample.columns for sample in samples] for name, samples in batch.samples.items()}
        parts = distributed.all_gather(own)
        names = dict.fromkeys(name for part in parts for name in part)
        columns = {name: [c for part in parts for c in part.get(name, [])] for name in names}
        samples = {name: batch.samples.get(name, []) for name in names}
        batches, metrics = learning.token_batches(samples, batch.plan.critic_only)
        everybody = {name: GlobalBatch.of(rows, together) for name, rows in batches.items()}
        others: list[Columns] = []
        if any(transform.needs_everybody for transform in self.transforms):
            known = {c.name for part in columns.values() for c in part}
            others = distributed.all_gather_lists(credited_by_nobody_else(batch.dialogues, known))
        assigned, kept = self.assign({name: one.rows for name, one in everybody.items()}, columns, others)
        batch.token_batches = {name: everybody[name].take(index).back(batches[name]) for name, index in kept.items()}
        return {name: metrics[name] | assigned[name] for name in metrics}

    # -- over tokens --------------------------------------------------------------------------------------------------

    def _number_groups(self, batches: dict[str, TokenBatch], rows: list[Row], columns: list[Columns]) -> None:
        """Tokens that are whitened together: within the key, an agent's, or all."""
        key = {"agent_std": ("agent",), "batch_std": ()}.get(self.config.scale, self.config.key)
        for number, members in enumerate(turn_batch(columns, [0.0] * len(columns)).groups(key)):
            for i in members:
                policy, row = rows[i]
                batches[policy].group[row] = number

    def _over_tokens(self, batches: dict[str, TokenBatch], rows: list[Row], columns: list[Columns]) -> None:
        if self.config.returns == "token_gae":
            for name, own in batches.items():
                token_gae(own, self.options, name in self.critics)
            return
        rewards = {name: token_rewards(own, self.options) for name, own in batches.items()}
        for trajectory in turn_batch(columns, [0.0] * len(columns)).trajectories(by_agent=False):
            self._chain(batches, rewards, [rows[i] for i in trajectory])

    def _chain(self, batches: dict[str, TokenBatch], rewards: dict[str, Tensor], rows: list[Row]) -> None:
        """GAE through the tokens of all utterances of a dialogue, as if one agent had said them."""
        masks = [batches[policy].sampled_mask[row] for policy, row in rows]
        pairs = list(zip(rows, masks, strict=True))
        chain = torch.cat([rewards[policy][row][mask] for (policy, row), mask in pairs]).unsqueeze(0)
        values = torch.cat([batches[policy].values[row][mask] for (policy, row), mask in pairs]).unsqueeze(0)
        everything = torch.ones_like(chain, dtype=torch.bool)
        advantages, returns = maths.gae(chain, values, everything, self.options.gamma, self.options.lam)
        lengths = [int(mask.sum()) for mask in masks]
        split = zip(pairs, advantages[0].split(lengths), returns[0].split(lengths), strict=True)
        for ((policy, row), mask), own_advantages, own_returns in split:
            batches[policy].advantages[row, mask] = own_advantages
            batches[policy].returns[row, mask] = own_returns

    # -- one number an utterance --------------------------------------------------------------------------------------

    def _over_rows(self, batches: dict[str, TokenBatch], rows: list[Row], columns: list[Columns]) -> None:
        """One number for each utterance, at each of its own tokens; its critic answers for its first token alone."""
        first = {name: _first_sampled(own.sampled_mask) for name, own in batches.items()}
        per_token = [transform for transform in self.transforms if transform.per_token]
        scores = {
            name: (own.score if per_token else token_rewards(own, self.options).sum(1)).tolist()
            for name, own in batches.items()
        }
        others = columns[len(rows) :]
        reward = [scores[policy][row] for policy, row in rows] + [c.credit for c in others]
        value = None
        if self.config.baseline == "critic":
            value = [float(batches[policy].values[row][first[policy][row]][0]) for policy, row in rows]
            value += [0.0] * len(others)
        batch = turn_batch(columns, reward, value)
        _spread(batches, rows, estimate_all(batch, self.config, self.state, scaled=not per_token), first)
        for transform in per_token:
            for own in batches.values():
                kl = token_kl(own, "k1")
                own.advantages = transform.apply_to_tokens(own.advantages, kl, own.sampled_mask, self.options.kl_coef)
        if per_token and self.config.scale != "none":
            self._number_groups(batches, rows, columns[: len(rows)])
            whiten_groups(list(batches.values()))


def turn_batch(columns: Sequence[Columns], reward: list[float], value: list[float] | None = None) -> TurnBatch:
    """The :class:`TurnBatch` of utterances, a row each."""
    number = {one.name: i for i, one in enumerate(columns)}

    def recorded(name: str) -> list | None:
        column = [getattr(one, name) for one in columns]
        return column if any(entry is not None for entry in column) else None

    return TurnBatch(
        reward=reward,
        value=value,
        prompt=[one.prompt for one in columns],
        rollout=[one.rollout for one in columns],
        agent=[one.agent for one in columns],
        role=[one.role for one in columns],
        turn=[one.turn for one in columns],
        order=[one.order for one in columns],
        parent=[_parent(one, number) for one in columns],
        caller=[None if one.caller is None else number.get(one.caller) for one in columns],
        action=[one.action for one in columns],
        game=recorded("game"),
        seed=recorded("seed"),
        state=recorded("state"),
    )


def _parent(one: Columns, number: Mapping[tuple, int]) -> int | None:
    """The row before this one on its branch: of the last step before it with a row, the same agent's, else the last."""
    earlier = [(order, agent, name) for order, agent, name in one.earlier if name in number]
    if not earlier:
        return None
    last = max(order for order, _, _ in earlier)
    step = [(agent, name) for order, agent, name in earlier if order == last]
    own = [name for agent, name in step if agent == one.agent]
    return number[own[-1] if own else step[-1][1]]


def _spread(batches: dict[str, TokenBatch], rows: list[Row], estimates: Estimates, first: Mapping[str, Tensor]) -> None:
    """Each utterance's number at each of its tokens; the critic's target at its first."""
    for own in batches.values():
        own.advantages, own.returns = torch.zeros_like(own.values), torch.zeros_like(own.values)
    for i, (policy, row) in enumerate(rows):
        own = batches[policy]
        own.advantages[row] = float(estimates.advantages[i]) * own.sampled_mask[row]
        own.returns[row] = float(estimates.targets[i]) * first[policy][row]
        own.weight[row] = float(estimates.weights[i])
    for name, own in batches.items():
        own.value_mask = first[name]


def _first_sampled(mask: Tensor) -> Tensor:
    """True at each row's first sampled token, whose position's value is that of the state before the answer."""
    return mask & (mask.cumsum(1) == 1)
