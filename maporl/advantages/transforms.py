"""Transforms: what is done to advantages at the end, from left to right. In YAML they are ``advantage.post``.

A transform is a dataclass of its options with hooks, of which it overrides those that it needs. Before rows are
compared, ``weigh`` says how often each row counts in a statistic and in the loss. Afterwards ``apply`` changes the
advantages.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from maporl.advantages.baselines import without_rounding
from maporl.advantages.batch import TurnBatch
from maporl.advantages.scales import whiten
from maporl.config.parse import build_named
from maporl.config.schema import AdvantageConfig
from maporl.rounding import ROUNDING, exceeds, mean_rank
from maporl.text import check_choices


class Transform:
    """The base class of transforms. A transform is a frozen dataclass of options. The hooks here change nothing."""

    needs: ClassVar[tuple[str, ...]] = ()
    """The columns that it needs."""
    needs_untrained_rows: ClassVar[bool] = False
    """Whether the rows must include utterances that are not trained on, such as those of past opponents."""
    per_token: ClassVar[bool] = False
    """Whether it gives each token its own number. The scale is then applied to tokens, after it."""
    trains_callees: ClassVar[bool] = False
    """Whether called utterances are trained on although they count in no statistic."""

    drops: ClassVar[bool] = False
    """Whether it leaves rows out of the loss because nothing, or too little, is to be learned from them."""
    compares_turns: ClassVar[bool] = False
    """Whether a row's advantage or weight depends on the rows of other turns of its dialogue, and not on its group's alone."""

    def __post_init__(self) -> None:
        check_choices(self)

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return how often each row counts in statistics and in the loss, [N], before rows are compared."""
        return torch.ones(len(batch), dtype=torch.float64)

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the changed advantages [N]."""
        return advantages

    def apply_to_tokens(self, advantages: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        """Return the changed advantages [N, T]. This is called only if :attr:`per_token` is true.

        ``kl`` [N, T] is the k1 estimate of the KL to the reference at each sampled token. ``mask`` [N, T] is true
        there.
        """
        return advantages

    def weigh_after(self, advantages: Tensor, weights: Tensor, batch: TurnBatch) -> Tensor:
        """Return how often each row counts in the loss, [N], after its advantage is known."""
        return weights


@dataclass(frozen=True)
class Align(Transform):
    """Let every dialogue count ``to`` turns of each agent, however often it was called (M-GRPO, arXiv 2511.13288).

    A turn is one utterance, or all segments of a turn in which the agent called tools. There are three ways to do this if
    an agent has k turns in a dialogue. ``weight`` lets each count ``to / k``
    times, which is the expectation of the other two ways. ``duplicate`` repeats random ones. ``drop`` leaves out random
    ones if there are too many and repeats random ones if there are too few, as the paper does. By default ``to`` is the
    number that at most 1% of the dialogues exceed.

    Only turns that were called are aligned. The k turns of an agent that nobody called, such as the planner's or those of a
    debate, are one trajectory. Each counts ``1 / k`` times, so a dialogue counts once. In a batch without the column ``caller``,
    which training never makes, all turns are aligned.
    """

    how: Literal["weight", "duplicate", "drop"] = "weight"
    to: int | None = None
    seed: int = 0
    needs = ("agent", "rollout")
    compares_turns = True

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return how often each row counts."""
        weights = torch.ones(len(batch), dtype=torch.float64)
        called: list[tuple[int, list[list[int]]]] = []
        for rows in batch.trajectories(by_agent=True):
            turns = _turns(batch, rows)
            main = [] if batch.caller is None else [own for own in turns if not batch.called(own[0])]
            for own in main:
                weights[own] = 1.0 / len(main)
            called += [(rows[0], [own for own in turns if own not in main])] if len(main) < len(turns) else []
        counts = sorted(len(turns) for _, turns in called)
        target = self.to or (counts[min(len(counts) - 1, int(0.99 * len(counts)))] if counts else 0)
        for row, turns in called:
            place = [column[row] for column in (batch.prompt, batch.rollout, batch.agent) if column is not None]
            rng = random.Random(f"{self.seed}/{place}")  # so that the order of dialogues does not matter
            if self.how == "weight":
                weights[[i for own in turns for i in own]] = target / len(turns)
            elif len(turns) > target and self.how == "drop":
                for own in rng.sample(turns, len(turns) - target):
                    weights[own] = 0.0
            else:
                for own in rng.choices(turns, k=max(0, target - len(turns))):
                    weights[own] += 1.0
        return weights


def _turns(batch: TurnBatch, rows: Sequence[int]) -> list[list[int]]:
    """Return the rows of each turn of an agent in a dialogue. Without the column ``turn`` each row is a turn."""
    turns: dict[int, list[int]] = {}
    for i in rows:
        turns.setdefault(i if batch.turn is None else batch.turn[i], []).append(i)
    return list(turns.values())


@dataclass(frozen=True)
class BroadcastToCallees(Transform):
    """Only utterances that nobody called are compared; what they called gets their advantage (MATPO, arXiv 2510.04678).

    The advantage is one number for an utterance, spread over that utterance's own tokens.
    """

    needs = ("caller",)
    trains_callees = True

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return 0 for utterances that were called, so that they count in no statistic."""
        callers = batch.column("caller", "post: broadcast_to_callees")
        return torch.tensor([float(caller is None or caller < 0) for caller in callers], dtype=torch.float64)

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Give each called utterance the advantage of its caller, also through several calls.

        Raises:
            ValueError: callers were not recorded.
        """
        callers = batch.column("caller", "post: broadcast_to_callees")
        result = advantages.clone()
        for i in batch.rows():
            root = i
            while callers[root] is not None and callers[root] >= 0:
                root = callers[root]
            result[i] = advantages[root]
        return result


@dataclass(frozen=True)
class OpponentShaping(Transform):
    """Advantage alignment (arXiv 2406.14662; with group baselines 2511.19405), for two agents on one grid of turns:

    ``A*_t = A_t + beta (sum_{k<t} gamma^(t-k) A_k) B_t``, where A is the agent's own advantage and B the other's. By
    default ``gamma`` is that of the returns. ``extra_gamma`` multiplies the sum by gamma once more, as the published
    code does.
    """

    beta: float = 1.0
    gamma: float | None = None
    extra_gamma: bool = False
    needs = ("agent", "rollout", "turn")
    needs_untrained_rows = True
    compares_turns = True

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the shaped advantages.

        Raises:
            ValueError: a dialogue does not have exactly two agents that both speak in every turn.
        """
        gamma = config.gamma if self.gamma is None else self.gamma
        agents = batch.column("agent", "post: opponent_shaping")
        turns = batch.column("turn", "post: opponent_shaping")
        result = advantages.clone()
        for rows in batch.groups(batch.dialogues()):
            by_agent = {
                a: {turns[i]: i for i in rows if agents[i] == a} for a in dict.fromkeys(agents[i] for i in rows)
            }
            grids = list(by_agent.values())
            if len(grids) != 2 or grids[0].keys() != grids[1].keys():
                raise ValueError(
                    "post: opponent_shaping needs exactly two agents who both speak in every turn of a dialogue; got "
                    + ", ".join(f"{agent!r} in turns {sorted(own)}" for agent, own in by_agent.items())
                )
            for mine, theirs in (grids, grids[::-1]):
                past = torch.zeros((), dtype=advantages.dtype)
                for turn in sorted(mine):
                    weight = past * gamma if self.extra_gamma else past
                    result[mine[turn]] = advantages[mine[turn]] + self.beta * weight * advantages[theirs[turn]]
                    past = gamma * (past + advantages[mine[turn]])
        return result


@dataclass(frozen=True)
class StepMerge(Transform):
    """SALT (arXiv 2510.20022), as reconstructed from its abstract: the same action in the same state in several
    dialogues of one prompt gets the mean of their advantages, because it cannot be the reason why they differ.

    An action is a move or an answer, however it is worded, and a state is what a player is shown. Each dialogue counts
    once in a mean, however often it comes back to the state.
    """

    needs = ("state",)

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the mean over rows with equal (prompt, agent, state, action), of those that are recorded.

        Raises:
            ValueError: states were not recorded.
        """
        result = advantages.clone()
        key = [name for name in ("prompt", "agent", "state", "action") if getattr(batch, name) is not None]
        if batch.state is None:
            batch.column("state", "post: step_merge")
        merged: dict[tuple, list[list[int]]] = {}
        for rows in batch.groups((*key, *batch.dialogues())):
            merged.setdefault(tuple(getattr(batch, name)[rows[0]] for name in key), []).append(rows)
        for dialogues in merged.values():
            mean = torch.stack([advantages[rows].mean() for rows in dialogues]).mean()
            for rows in dialogues:
                result[rows] = mean
        return result


@dataclass(frozen=True)
class Whiten(Transform):
    """Subtract the mean of the advantages of the rows with equal ``key``, and divide by their standard deviation.

    Without a key it is that of the whole batch, as GDPO (arXiv 2601.05242) does in the end. ``over: tokens`` counts each row
    as often as it has tokens. ``advantage.ddof`` and ``advantage.eps`` apply. A group of one gets 0.
    """

    key: tuple[str, ...] = ()
    over: Literal["rows", "tokens"] = "rows"
    compares_turns = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # it follows from the options
        """The columns that it needs."""
        return (*self.key, "tokens") if self.over == "tokens" else self.key

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the whitened advantages.

        Raises:
            ValueError: a column was not recorded.
        """
        weights = torch.ones(len(batch), dtype=advantages.dtype)
        if self.over == "tokens":
            weights = batch.tensor(batch.column("tokens", "post: whiten"))
        groups = batch.groups(self.key, "post: whiten")
        several = [rows for rows in groups if len(rows) > 1]
        return whiten(advantages, several, weights, config)


@dataclass(frozen=True)
class EqualShares(Transform):
    """Let each agent count alike in each dialogue, however often or how much it speaks.

    With ``within: prompt`` it counts alike in all dialogues of a question together. A proposer whose questions are not all asked
    then counts no more than the one who answers them (SPICE, arXiv 2510.24684, trains on as many answers as proposals).

    ``of: turns`` gives each of an agent's k utterances in a dialogue the weight 1/k. With ``aggregation: sequence_mean``
    the loss is then the mean over turns and, after it, over dialogues (ReMA, arXiv 2503.09501). ``of: tokens`` divides by
    the number of its tokens there. With ``aggregation: token_mean`` an agent that says more then counts no more.
    ``agents: share`` divides by the number of agents of the dialogue too, so that each dialogue counts 1
    (WideSeek-R1, arXiv 2602.04634). With ``calls: apart`` each turn that was called counts as an agent of its own, as the
    sub-agents there do; where callers are not recorded, nobody was called. Statistics of groups are not changed.
    """

    of: Literal["turns", "tokens"] = "turns"
    agents: Literal["each", "share"] = "each"
    calls: Literal["together", "apart"] = "together"
    within: Literal["dialogue", "prompt"] = "dialogue"
    needs = ("agent", "rollout", "tokens")
    compares_turns = True

    def weigh_after(self, advantages: Tensor, weights: Tensor, batch: TurnBatch) -> Tensor:
        """Return the weights divided by what the agent says in its dialogue, or on its prompt. Rows that do not count are left out.

        Raises:
            ValueError: a column was not recorded.
        """
        tokens = batch.tensor(batch.column("tokens", "post: equal_shares"))
        shares = weights.clone()
        whole = [name for name in batch.dialogues() if name != "rollout" or self.within == "dialogue"]
        for rows in batch.groups(whole):
            speakers = self._speakers(batch, [i for i in rows if weights[i] > 0])
            for own in speakers:
                said = weights[own].sum() if self.of == "turns" else (weights[own] * tokens[own]).sum()
                shares[own] = weights[own] / said / (len(speakers) if self.agents == "share" else 1)
        return shares

    def _speakers(self, batch: TurnBatch, rows: list[int]) -> list[list[int]]:
        agents = batch.column("agent", "post: equal_shares")
        speakers: dict[tuple, list[int]] = {}
        for i in rows:
            called = self.calls == "apart" and batch.called(i)
            turn = batch.column("turn", "post: equal_shares")[i] if called else None
            speakers.setdefault((agents[i], turn), []).append(i)
        return list(speakers.values())


@dataclass(frozen=True)
class EndOfFailures(Transform):
    """Of a dialogue that earned no more than ``above``, only the last utterance is trained on (WideSeek-R1, arXiv 2602.04634).

    A KL in the reward does not count in what it earned.

    It is the last one that nobody called; where callers are not recorded, nobody was called. What was said before it may have
    been good, and the end alone may have spoilt the dialogue, such as an answer in no form that can be read. All rows still count
    in the statistics of groups. Where ``equal_shares`` follows, its shares are those of the rows that stay.
    """

    above: float = 0.0
    needs = ("rollout", "order")
    compares_turns = True

    def weigh_after(self, advantages: Tensor, weights: Tensor, batch: TurnBatch) -> Tensor:
        """Return 0 for all rows of a failure but its last one.

        Raises:
            ValueError: a column was not recorded.
        """
        kept = weights.clone()
        for rows in batch.trajectories(by_agent=False):
            own = [i for i in rows if not batch.called(i)]
            if own and not any(exceeds(batch.earned[i], self.above) for i in rows):
                kept[[i for i in rows if i != own[-1]]] = 0.0
        return kept


@dataclass(frozen=True)
class Duration(Transform):
    """Multiply each advantage by the duration of its row, divided by the mean duration of the batch (arXiv 2509.01684).

    Without it, actions that are soon done are sampled more often in a given time, and count more. The duration of a row
    is how long its calls took, plus ``token_seconds`` for each of its sampled tokens. With ``token_seconds`` 0 a row
    without calls has the advantage 0, unless no row of the batch took any time; then nothing changes. Times are
    measured, so two runs with this transform differ.

    Raises:
        ValueError: ``token_seconds`` is negative.
    """

    token_seconds: float = 0.0
    needs = ("seconds", "tokens")
    compares_turns = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.token_seconds < math.inf:
            raise ValueError(f"token_seconds: expected a number of at least 0, got {self.token_seconds}")

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Return the multiplied advantages.

        Raises:
            ValueError: a column was not recorded.
        """
        seconds = batch.tensor(batch.column("seconds", "post: duration"))
        durations = seconds + self.token_seconds * batch.tensor(batch.column("tokens", "post: duration"))
        mean = durations[batch.rows()].mean()
        return advantages * durations / mean if mean > 0 else advantages


@dataclass(frozen=True)
class DropZeros(Transform):
    """Rows whose advantage is 0 are not trained on (SPIRAL; dynamic sampling): they would only dilute a token mean.

    An advantage of which only rounding is left, beside the largest one of the batch, is 0.
    """

    drops = True

    def weigh_after(self, advantages: Tensor, weights: Tensor, batch: TurnBatch) -> Tensor:
        """Return 0 where the advantage is 0."""
        return torch.where(without_rounding(advantages, advantages) == 0, 0.0, weights)


@dataclass(frozen=True)
class DropGroups(Transform):
    """Leave out the ``share`` of the groups whose mean reward is lowest (AT-GRPO, PettingLLMs' ``filter_method: mean``).

    The rows with equal ``key`` are a group, as in ``advantage.key``. Each policy's groups are ranked over the whole batch, on
    all processes. A KL in the reward does not count in their means. Their number times ``share`` is rounded down. Of groups with equal means the one goes first whose key comes
    first. All rows of a group stay, or none. Those that are left out count in no statistic.

    It keeps what is nearly solved and leaves out what is still too hard, whether or not the rewards of a group differ. To leave
    out groups from which nothing is to be learned, use ``drop_zeros``.

    Raises:
        ValueError: ``share`` is not from 0 to below 1, or ``key`` names no column.
    """

    key: tuple[str, ...] = ("prompt",)
    share: float = 0.5
    drops = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.key:
            raise ValueError(
                "key: expected the columns whose rows form a group, such as [prompt], got [], by which all rows are one group"
            )
        if not 0 <= self.share < 1:
            raise ValueError(f"share: expected a number from 0 to below 1, got {self.share}")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # it follows from the options
        """The columns that it needs."""
        return self.key

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return 0 for the rows that are left out, and 1 for the others.

        Raises:
            ValueError: a column was not recorded.
        """
        weights = torch.ones(len(batch), dtype=torch.float64)
        by_policy: dict[Any, list[list[int]]] = {}
        own = () if batch.policy is None else ("policy",)
        for rows in batch.groups((*own, *self.key), "post: drop_groups"):
            by_policy.setdefault(None if batch.policy is None else batch.policy[rows[0]], []).append(rows)
        for groups in by_policy.values():
            groups.sort(key=lambda rows: self._rank(batch, rows))
            # 100 groups times 0.29 are 29, but less in float64
            for rows in groups[: math.floor(len(groups) * self.share * (1 + ROUNDING))]:
                weights[rows] = 0.0
        return weights

    def _rank(self, batch: TurnBatch, rows: Sequence[int]) -> tuple:
        names = [batch.column(name, "post: drop_groups")[rows[0]] for name in self.key]
        # numbers by their size and all else by its text, because a column may hold both
        keys = [(0, name, "") if isinstance(name, int | float) else (1, 0, str(name)) for name in names]
        return (mean_rank([batch.earned[i] for i in rows]), *keys)


@dataclass(frozen=True)
class CumulativeKL(Transform):
    """``A_t = A - beta sum_{l>=t} log(pi_old/pi_ref)_l`` for each token (REINFORCE++, arXiv 2501.03262).

    ``beta`` is ``ppo.kl_coef``, which then penalises nothing else. This transform works on tokens, so the trainer
    applies it, and then applies the scale to tokens too. The scales "token_std" and "std" whiten tokens within the key;
    "agent_std" and "batch_std" whiten them over an agent and over the batch.
    """

    per_token = True

    def apply_to_tokens(self, advantages: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        """Subtract the KL of each token and of all later tokens."""
        to_come = kl.flip(1).cumsum(1).flip(1)
        return torch.where(mask, advantages - kl_coef * to_come, 0.0)

    def apply(self, advantages: Tensor, batch: TurnBatch, config: AdvantageConfig) -> Tensor:
        """Refuse, because an utterance has no single advantage here.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "post: cumulative_kl gives every token its own advantage, so estimate() has no number for a row; in a run the "
            "trainer applies it (maporl.training.assign)"
        )


TRANSFORMS: dict[str, Any] = {
    "align": Align,
    "broadcast_to_callees": BroadcastToCallees,
    "opponent_shaping": OpponentShaping,
    "step_merge": StepMerge,
    "whiten": Whiten,
    "equal_shares": EqualShares,
    "end_of_failures": EndOfFailures,
    "duration": Duration,
    "drop_zeros": DropZeros,
    "drop_groups": DropGroups,
    "cumulative_kl": CumulativeKL,
}


def build_transforms(config: AdvantageConfig, where: str = "advantage") -> list[Transform]:
    """Build the transforms that a configuration names in ``post``, in its order: a name, or ``{name: options}``.

    Raises:
        ConfigError: a name is unknown, or its options are wrong.
    """
    return build_named(config.post, TRANSFORMS, f"{where}.post", Transform)
