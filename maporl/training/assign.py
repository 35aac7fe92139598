"""Compute the advantages of all policies' token batches, by the slots that the configuration names."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maporl.advantages.baselines import BaselineState, baseline_of
from maporl.advantages.batch import TurnBatch
from maporl.advantages.estimator import Estimates, estimate_all
from maporl.advantages.returns import return_of
from maporl.advantages.scales import scale_of
from maporl.advantages.slots import numbers_of
from maporl.advantages.transforms import Transform, build_transforms
from maporl.config.algorithm import alike
from maporl.config.schema import AdvantageConfig
from maporl.errors import ConfigError
from maporl.rounding import differ
from maporl.training.samples import Columns, Name, TeamUpdateBatch, turn_batch, untrained_columns
from trl_ext.learning.audit import COUNT
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Metrics
from trl_ext.ppo import maths
from trl_ext.ppo.advantages import gae_of, row_metrics, token_gae, token_kl, token_rewards, whiten_groups
from trl_ext.ppo.batch import GlobalBatch, TokenBatch
from trl_ext.ppo.options import PPOOptions
from trl_ext.process import distributed

Row = tuple[str, int]
"""A policy's name and a row of its token batch."""


class TeamAdvantages:
    """Computes the advantages of an update, over the samples of all processes, each agent's as its own section says.

    What agents with equal sections said is compared together.

    Args:
        configs: the slots of each agent: return, baseline, scale, transforms and key.
        options: each policy's options, such as the discount, lambda and the KL coefficient.
        critics: the names of the policies that have a critic.
        sources: the weights of the reward sources, for ``normalize_then_sum``.
    """

    def __init__(
        self,
        configs: Mapping[str, AdvantageConfig],
        options: Mapping[str, PPOOptions],
        critics: Collection[str] = (),
        sources: Mapping[str, float] | None = None,
    ):
        self.each = {tuple(n): Advantages(configs[n[0]], options, critics, sources) for n in alike(configs)}
        """What computes the advantages of the agents that are named."""

    def fill(
        self, batch: TeamUpdateBatch, learning: Learning, together: torch.device | None = None
    ) -> dict[str, Metrics]:
        """Fill in the token batches of ``batch`` from its samples, with advantages over the samples of all processes.

        Processes exchange columns and token rows, and not dialogues. All processes call this together.

        Args:
            batch: this process's batch.
            learning: the learners.
            together: the device on which rows are compared, if base models are on several devices.

        Returns:
            Statistics by policy.

        Raises:
            ValueError: a group has a single member, or a column that is needed was not recorded.
            NonFiniteError: a log-probability or a value is NaN or infinite.
        """
        parts = distributed.all_gather({name: [s.columns for s in samples] for name, samples in batch.samples.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        columns = {name: [c for part in parts for c in part.get(name, [])] for name in names}
        samples = {name: batch.samples.get(name, []) for name in names}
        batches, metrics = learning.token_batches(samples, batch.critic_only)
        rollouts = sum(distributed.all_gather(len(batch.dialogues)))
        for rows in batches.values():
            rows.rollouts = rollouts
        gathered = {name: GlobalBatch.of(rows, together) for name, rows in batches.items()}
        others: list[Columns] = []
        if any(transform.needs_untrained_rows for each in self.each.values() for transform in each.transforms):
            known = {c.name for part in columns.values() for c in part}
            others = distributed.all_gather_lists(untrained_columns(batch.dialogues, known))
        assigned, batch.compared = self.assign({name: whole.rows for name, whole in gathered.items()}, columns, others)
        weighted = {name: whole.rows.weight.nonzero().flatten() for name, whole in gathered.items()}
        batch.token_batches = {
            name: gathered[name].take(index).back(batches[name]) for name, index in weighted.items() if len(index)
        }
        return {name: metrics[name] | assigned[name] for name in metrics}

    def assign(
        self, batches: dict[str, TokenBatch], columns: Mapping[str, Sequence[Columns]], others: Sequence[Columns] = ()
    ) -> tuple[dict[str, Metrics], dict[Name, dict[str, Any]]]:
        """Fill in ``advantages``, ``returns`` and ``weight`` of token batches with old log-probabilities and values.

        Args:
            batches: by policy, the rows of all processes.
            columns: by policy, the columns of each row, in the same order.
            others: the columns of utterances that no policy trains on, if a transform needs them.

        Returns:
            Statistics by policy, those of agents that are compared apart as means over the rows, and with what each
            utterance is compared.

        Raises:
            ValueError: a group has a single member, or a column that is needed was not recorded.
        """
        if len(self.each) == 1:
            [advantages] = self.each.values()
            return advantages.assign(batches, columns, others)
        found: dict[str, list[tuple[int, Metrics]]] = defaultdict(list)
        compared: dict[Name, dict[str, Any]] = {}
        everybody = [*(c for entries in columns.values() for c in entries), *others]
        for agents, advantages in self.each.items():
            chosen = {
                name: torch.tensor([i for i, c in enumerate(entries) if c.values["agent"] in agents], dtype=torch.long)
                for name, entries in columns.items()
            }
            index = {name: places for name, places in chosen.items() if len(places)}
            rows = {name: batches[name].take(places) for name, places in index.items()}
            own = {name: [columns[name][i] for i in places.tolist()] for name, places in index.items()}
            taken = {c.name for entries in own.values() for c in entries}
            metrics, more = advantages.assign(rows, own, [c for c in everybody if c.name not in taken])
            compared |= more
            for name, places in index.items():
                batches[name].put(places, rows[name])
                found[name].append((len(places), metrics[name]))
        return {name: _joined(parts) for name, parts in found.items()}, compared

    @property
    def means(self) -> dict[str, float]:
        """The running means of baselines, which a checkpoint keeps. Those of agents apart begin with their names."""
        if len(self.each) == 1:
            [advantages] = self.each.values()
            return dict(advantages.state.means)
        apart = {",".join(names): advantages.state.means for names, advantages in self.each.items()}
        return {f"{names}/{key}": mean for names, means in apart.items() for key, mean in means.items()}

    @means.setter
    def means(self, means: Mapping[str, float]) -> None:
        """Take what a checkpoint has kept."""
        for names, advantages in self.each.items():
            begins = "" if len(self.each) == 1 else f"{','.join(names)}/"
            own = {key.removeprefix(begins): mean for key, mean in means.items() if key.startswith(begins)}
            advantages.state.means = own


def _joined(parts: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Return the statistics of a policy whose rows were compared in parts: sums of counts, and means over rows."""
    names = dict.fromkeys(name for _, metrics in parts for name in metrics)
    joined = {}
    for name in names:
        there = [(rows, metrics[name]) for rows, metrics in parts if name in metrics]
        total = sum(rows * value for rows, value in there) / sum(rows for rows, _ in there)
        joined[name] = sum(value for _, value in there) if name.startswith(COUNT) else total
    return joined


class Advantages:
    """Computes the advantages of agents whose credits become advantages in one way.

    The arguments are those of :class:`TeamAdvantages`, but for ``config``, the slots.
    """

    def __init__(
        self,
        config: AdvantageConfig,
        options: Mapping[str, PPOOptions],
        critics: Collection[str] = (),
        sources: Mapping[str, float] | None = None,
    ):
        self.config, self.options, self.critics = config, options, frozenset(critics)
        self.sources = sources if config.multi_objective_aggregation == "normalize_then_sum" else None
        self.returned, self.baseline, self.scale = return_of(config), baseline_of(config), scale_of(config)
        self.transforms: list[Transform] = build_transforms(config)
        self.state = BaselineState()

    def assign(
        self,
        batches: dict[str, TokenBatch],
        columns: Mapping[str, Sequence[Columns]],
        others: Sequence[Columns] = (),
    ) -> tuple[dict[str, Metrics], dict[Name, dict[str, Any]]]:
        """Do what :meth:`TeamAdvantages.assign` does, for these agents alone."""
        if not batches:
            return {}, {}
        rows = [(policy, number) for policy, entries in columns.items() for number in range(len(entries))]
        row_columns = [entry for entries in columns.values() for entry in entries]
        turns = unpaid(row_columns)
        others = others if any(transform.needs_untrained_rows for transform in self.transforms) else ()
        everything = [*row_columns, *others]
        compared = self.compared(unpaid(everything) if others else turns, everything)
        if self.returned.per_token:
            self._number_groups(batches, rows, turns)
            self._over_tokens(batches, rows, turns)
            spreads: dict[str, Metrics] = {}
            if self.config.scale != "none":
                whiten_groups(list(batches.values()))
        else:
            spreads = self._over_rows(batches, rows, everything, turns)
        measure = partial(row_metrics, alone=self.returned.along == "utterance")
        metrics = {
            name: measure(rows, options=self.options[name], has_critic=name in self.critics) | spreads.get(name, {})
            for name, rows in batches.items()
        }
        shared = {n for n in batches if self.options[n].aggregation in ("sequence_mean", "per_main_rollout")}
        for (policy, row), share in zip(rows, turn_shares(turns), strict=True) if shared else ():
            if policy in shared:
                batches[policy].weight[row] *= share
        for name, counts in self._counts(turns, row_columns).items():
            metrics[name] |= counts
        return metrics, compared

    def compared(self, turns: TurnBatch, columns: Sequence[Columns]) -> dict[Name, dict[str, Any]]:
        """Return which rows each row's return is compared with, as the record of a dialogue holds it.

        ``by`` is ``baseline``, or ``scale`` where the baseline compares no rows, and ``name`` is what the configuration
        calls it. ``key`` has the values that the rows have in common. ``utterances`` and ``questions`` count them, and
        ``credit`` is the mean of their credits. It is empty if rows are compared with no other rows.
        """
        by, slot = ("baseline", self.baseline) if self.baseline.over != "nothing" else ("scale", self.scale)
        if slot.over == "nothing":
            return {}
        key = {"group": self.config.key, "agent": ("agent",), "batch": ()}[slot.over]
        found: dict[Name, dict[str, Any]] = {}
        for rows in turns.groups(key):
            values = {name: turns.column(name, "key")[rows[0]] for name in key}
            credit = math.fsum([columns[i].credit for i in rows]) / len(rows)
            group = {
                "by": by,
                "name": str(getattr(self.config, by)),
                "key": {name: value if isinstance(value, int | str) else None for name, value in values.items()},
                "utterances": len(rows),
                "questions": len({columns[i].values["prompt"] for i in rows}),
                "credit": round(credit, 4),
            }
            found |= {columns[i].name: group for i in rows}
        return found

    @property
    def in_groups(self) -> bool:
        """Whether an answer is compared with others of its group, and not with what a critic expects or with all."""
        return not self.returned.per_token and self.baseline.over == "group"

    def _counts(self, turns: TurnBatch, columns: Sequence[Columns]) -> dict[str, Metrics]:
        """Return for each policy the number of its groups with several rows, or 1 for the whole batch where rows are in
        no groups, and in how many of them credits differ."""
        counts: dict[str, Metrics] = defaultdict(lambda: {f"{COUNT}compared": 0.0, f"{COUNT}differ": 0.0})
        for rows in turns.groups(self.config.key if self.in_groups else ("policy",)):
            apart = float(differ([columns[i].credit for i in rows]))
            for policy in {columns[i].values["policy"] for i in rows} if len(rows) > 1 else ():
                counts[policy][f"{COUNT}compared"] += 1.0
                counts[policy][f"{COUNT}differ"] += apart
        return counts

    # -- over tokens --------------------------------------------------------------------------------------------------

    def _number_groups(self, batches: dict[str, TokenBatch], rows: list[Row], turns: TurnBatch) -> None:
        """Fill in ``group``, by the key, by the agent, or for all rows. A group is whitened together."""
        key = {"agent": ("agent",), "batch": ()}.get(self.scale.over, self.config.key)
        for number, members in enumerate(turns.groups(key)):
            for i in members:
                policy, row = rows[i]
                batches[policy].group[row] = number

    def _over_tokens(self, batches: dict[str, TokenBatch], rows: list[Row], turns: TurnBatch) -> None:
        along = self.returned.along
        if along == "utterance":
            for name, batch in batches.items():
                token_gae(batch, self.options[name], name in self.critics)
            return
        rewards = {name: token_rewards(batch, self.options[name]) for name, batch in batches.items()}
        for trajectory in turns.trajectories(by_agent=along == "agent"):
            chained = [rows[i] for i in trajectory]
            if self.returned.two_levels:
                self._end_turns(batches, rewards, chained)
            else:
                self._chain(batches, rewards, chained)
        if self.returned.two_levels:
            for name, batch in batches.items():
                options = self.options[name]
                batch.advantages, batch.returns = gae_of(rewards[name], batch.values, batch.sampled_mask, options)

    def _chain(self, batches: dict[str, TokenBatch], rewards: dict[str, Tensor], rows: list[Row]) -> None:
        """Run GAE through the sampled tokens of all utterances of a dialogue, or of an agent in it, as if they were
        one."""
        spans = [slice(batches[policy].first[row], batches[policy].tree.lengths[row]) for policy, row in rows]
        pairs = list(zip(rows, spans, strict=True))
        chain = torch.cat([rewards[policy][row, span] for (policy, row), span in pairs]).unsqueeze(0)
        values = torch.cat([batches[policy].values[row, span] for (policy, row), span in pairs]).unsqueeze(0)
        everything = torch.ones_like(chain, dtype=torch.bool)
        # the policies of a chain have one discount and one lambda (maporl.advantages.check)
        advantages, returns = gae_of(chain, values, everything, self.options[rows[0][0]])
        lengths = [span.stop - span.start for span in spans]
        split = zip(pairs, advantages[0].split(lengths), returns[0].split(lengths), strict=True)
        for ((policy, row), span), row_advantages, row_returns in split:
            batches[policy].advantages[row, span] = row_advantages
            batches[policy].returns[row, span] = row_returns

    def _end_turns(self, batches: dict[str, TokenBatch], rewards: dict[str, Tensor], rows: list[Row]) -> None:
        """Replace the reward of each utterance's last token by the lambda-return of GAE over an agent's utterances."""
        # the first level of VAGEN's bi-level GAE (arXiv 2510.16907): an utterance's reward and value are those of its
        # last token; GAE within each utterance is the second, which gives its last token the utterance's advantage
        ends = [(policy, (row, batches[policy].tree.lengths[row] - 1)) for policy, row in rows]
        earned = torch.stack([rewards[policy][place] for policy, place in ends]).unsqueeze(0)
        values = torch.stack([batches[policy].values[place] for policy, place in ends]).unsqueeze(0)
        everything = torch.ones_like(earned, dtype=torch.bool)
        _, returns = maths.gae(earned, values, everything, self.config.gamma, self.config.lam)
        for (policy, place), worth in zip(ends, returns[0], strict=True):
            rewards[policy][place] = worth

    # -- one number for each utterance --------------------------------------------------------------------------------

    def _over_rows(
        self, batches: dict[str, TokenBatch], rows: list[Row], columns: list[Columns], unpaid_turns: TurnBatch
    ) -> dict[str, Metrics]:
        """Give all tokens of an utterance one advantage. Return by policy how much the returns in its groups differ."""
        # the critic's value is that of the first token, or of the last one if the baseline reads what was said
        after = self.baseline.reads_after
        judged = {name: _one_sampled(batch.sampled_mask, last=after) for name, batch in batches.items()}
        per_token = [transform for transform in self.transforms if transform.per_token]
        scores = {name: batch.score.tolist() for name, batch in batches.items()}
        rewards = scores
        if not per_token:
            earned = {name: token_rewards(batch, self.options[name]) for name, batch in batches.items()}
            rewards = {name: amounts.sum(1).tolist() for name, amounts in earned.items()}
        others = columns[len(rows) :]
        reward, score = (
            [amounts[policy][row] for policy, row in rows] + [c.credit for c in others] for amounts in (rewards, scores)
        )
        value = None
        if self.baseline.needs_critic:
            values = {name: batch.values[judged[name]].tolist() for name, batch in batches.items()}
            value = [values[policy][row] for policy, row in rows]
            value += [0.0] * len(others)
        turns = turn_batch(columns, reward, value, self.sources, score)
        _must_be_sums(turns)
        estimates = estimate_all(turns, self.config, self.state, scaled=not per_token)
        _spread(batches, rows, estimates, judged)
        for transform in per_token:
            for name, batch in batches.items():
                kl, mask = token_kl(batch, "k1"), batch.sampled_mask
                where, given = f"advantage.post: {type(transform).__name__}: apply_to_tokens", batch.advantages
                batch.advantages = numbers_of(
                    where, transform.apply_to_tokens, given, kl, mask, self.options[name].kl_coef, like=given
                )
        if per_token and self.config.scale != "none":
            self._number_groups(batches, rows, unpaid_turns)
            whiten_groups(list(batches.values()), unbiased=self.config.ddof == 1)
        compared = turns.groups(self.config.key) if self.baseline.over == "group" else []
        owners = [policy for policy, _ in rows]
        metrics = {name: group_spreads(estimates, compared, owners, name) for name in batches}
        if compared and any(transform.drops for transform in self.transforms):
            for name, policy_metrics in metrics.items():
                policy_metrics["frac_groups_dropped"] = share_dropped(estimates, compared, owners, name)
        return metrics


def unpaid(columns: Sequence[Columns]) -> TurnBatch:
    """Return the rows of ``columns`` with rewards of 0, to group them."""
    return turn_batch(columns, [0.0] * len(columns))


def turn_shares(turns: TurnBatch) -> list[float]:
    """Return for each row its share of the sampled tokens of its turn.

    A turn in which an agent called tools has several rows. With these weights the sum of the rows' token means is the
    token mean of the turn, so that it is one sequence. A row that is a whole turn has the share 1.
    """
    tokens = turns.column("tokens", "turn_shares")
    shares = [1.0] * len(turns)
    for rows in turns.groups((*turns.dialogues(), "agent", "turn")):
        whole = sum(tokens[i] for i in rows)
        for i in rows if len(rows) > 1 and whole else ():
            shares[i] = tokens[i] / whole
    return shares


def group_spreads(estimates: Estimates, groups: Sequence[Sequence[int]], owners: Sequence[str], policy: str) -> Metrics:
    """Return ``reward_std`` and ``frac_reward_zero_std`` of a policy's groups, under the names of TRL's
    ``GRPOTrainer``.

    The first is the unbiased standard deviation of the returns in a group, averaged over groups. The second is the
    share of groups whose returns are all equal, from which nothing is learned. Rows of weight 0 and groups of one row
    are left out.

    Args:
        estimates: the returns and weights of the rows.
        groups: the rows of each group.
        owners: the policy of each row that a policy learns from.
        policy: the policy, of which a group has a row.
    """
    returns, weights = estimates.targets.tolist(), estimates.weights.tolist()
    spreads = []
    for members in groups:
        trained = [i for i in members if i < len(owners) and weights[i] > 0]
        if len(trained) > 1 and policy in {owners[i] for i in trained}:
            group_returns = [returns[i] for i in trained]
            spreads.append(statistics.stdev(group_returns) if differ(group_returns) else 0.0)
    if not spreads:
        return {}
    return {
        "reward_std": math.fsum(spreads) / len(spreads),
        "frac_reward_zero_std": spreads.count(0.0) / len(spreads),
    }


def share_dropped(estimates: Estimates, groups: Sequence[Sequence[int]], owners: Sequence[str], policy: str) -> float:
    """Return the share of a policy's groups none of whose rows have a weight.

    The arguments are those of :func:`group_spreads`.
    """
    weights = estimates.weights.tolist()
    policy_groups = [[i for i in members if i < len(owners) and owners[i] == policy] for members in groups]
    trained = [any(weights[i] > 0 for i in members) for members in policy_groups if members]
    return trained.count(False) / len(trained) if trained else 0.0


def _spread(
    batches: dict[str, TokenBatch], rows: list[Row], estimates: Estimates, judged: Mapping[str, Tensor]
) -> None:
    """Write each utterance's advantage to all its sampled tokens, and the critic's target to the ``judged`` one."""
    for batch in batches.values():
        batch.advantages, batch.returns = torch.zeros_like(batch.values), torch.zeros_like(batch.values)
    for i, (policy, row) in enumerate(rows):
        batch = batches[policy]
        batch.advantages[row] = float(estimates.advantages[i]) * batch.sampled_mask[row]
        batch.returns[row] = float(estimates.targets[i]) * judged[policy][row]
        batch.weight[row] = float(estimates.weights[i])
    for name, batch in batches.items():
        batch.value_mask = judged[name].cpu()


def _one_sampled(mask: Tensor, last: bool) -> Tensor:
    """Return a mask of each row's first or ``last`` sampled token."""
    # the value of a token is that of the state before it
    place = mask.cumsum(1)
    return mask & (place == (mask.sum(1, keepdim=True) if last else 1))


def _must_be_sums(batch: TurnBatch) -> None:
    """Check that what each row earned is the weighted sum of its own rewards, if these are compared apart."""
    parts, weights = batch.parts or {}, batch.part_weights or {}
    for i in batch.rows() if parts else []:
        total = sum(weights.get(name, 1.0) * (values[i] or 0.0) for name, values in parts.items())
        if abs(total - batch.reward[i]) > 1e-5 * max(1.0, abs(total)):
            raise ConfigError(
                "advantage.multi_objective_aggregation: normalize_then_sum compares each reward of an utterance "
                f"alone, but an utterance of agent {(batch.agent or ['?'])[i]!r} with the rewards "
                f"{ ({n: v[i] for n, v in parts.items()}) } is credited with {batch.reward[i]:g} and not with their "
                f"weighted sum {total:g}; set sum_then_normalize"
            )
