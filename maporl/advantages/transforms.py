"""Transforms: what is done to advantages at the end, from left to right. In YAML they are ``advantage.post``.

Those that one method alone uses are in :mod:`maporl.methods`.

A transform is a dataclass of its options with hooks, of which it overrides those that it needs. Before rows are
compared, ``weigh`` says how often each row counts in a statistic and in the loss. Afterwards ``apply`` changes the
advantages.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from maporl.advantages.baselines import without_rounding
from maporl.advantages.batch import TurnBatch
from maporl.advantages.scales import whiten
from maporl.config.imports import Parts
from maporl.config.parse import build_named
from maporl.config.schema import AdvantageConfig
from trl_ext.ppo.options import Checked, NotNegative, option


class Transform(Checked):
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
    """Whether a row's advantage or weight depends on the rows of other turns of its dialogue, and not on its group's
    alone."""

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
class Whiten(Transform):
    """Subtract the mean of the advantages of the rows with equal ``key``, and divide by their standard deviation.

    ``advantage.ddof`` and ``advantage.eps`` apply. A group of one gets 0.
    """

    key: tuple[str, ...] = option(
        (),
        "The columns whose rows form a group. Without one it is the whole batch, as GDPO (arXiv 2601.05242) does in "
        "the end.",
    )
    over: Literal["rows", "tokens"] = option("rows", "Whether each row counts once, or as often as it has tokens.")
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

    Statistics of groups are not changed.
    """

    of: Literal["turns", "tokens"] = option(
        "turns",
        "turns gives each of an agent's k utterances in a dialogue the weight 1/k. With `aggregation: sequence_mean` "
        "the loss is then the mean over turns and, after it, over dialogues (ReMA, arXiv 2503.09501). tokens divides "
        "by the number of its tokens there. With `aggregation: token_mean` an agent that says more then counts no "
        "more.",
    )
    agents: Literal["each", "share"] = option(
        "each",
        "share divides by the number of agents of the dialogue too, so that each dialogue counts 1 (WideSeek-R1, "
        "arXiv 2602.04634).",
    )
    calls: Literal["together", "apart"] = option(
        "together",
        "With apart, each turn that was called counts as an agent of its own, as the sub-agents there do; where "
        "callers are not recorded, nobody was called.",
    )
    within: Literal["dialogue", "prompt"] = option(
        "dialogue",
        "With prompt, an agent counts alike in all dialogues of a question together. A proposer whose questions are "
        "not all asked then counts no more than the one who answers them (SPICE, arXiv 2510.24684, trains on as many "
        "answers as proposals).",
    )
    needs = ("agent", "rollout", "tokens")
    compares_turns = True

    def weigh_after(self, advantages: Tensor, weights: Tensor, batch: TurnBatch) -> Tensor:
        """Return the weights divided by what the agent says in its dialogue, or on its prompt. Rows that do not count
        are left out.

        Raises:
            ValueError: a column was not recorded.
        """
        tokens = batch.tensor(batch.column("tokens", "post: equal_shares"))
        shares = weights.clone()
        whole = [name for name in batch.dialogues() if name != "rollout" or self.within == "dialogue"]
        for rows in batch.groups(whole):
            speakers = self._speakers(batch, [i for i in rows if weights[i] > 0])
            for turns in speakers:
                said = weights[turns].sum() if self.of == "turns" else (weights[turns] * tokens[turns]).sum()
                shares[turns] = weights[turns] / said / (len(speakers) if self.agents == "share" else 1)
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
class Duration(Transform):
    """Multiply each advantage by the duration of its row, divided by the mean duration of the batch (arXiv 2509.01684).

    Without it, actions that are soon done are sampled more often in a given time, and count more. The duration of a row
    is how long its calls took, plus ``token_seconds`` for each of its sampled tokens. With ``token_seconds`` 0 a row
    without calls has the advantage 0, unless no row of the batch took any time; then nothing changes. Times are
    measured, so two runs with this transform differ.

    Raises:
        ValueError: ``token_seconds`` is negative.
    """

    token_seconds: NotNegative = option(0.0, "The seconds of a sampled token.")
    needs = ("seconds", "tokens")
    compares_turns = True

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
        raise ValueError("post: cumulative_kl is about tokens, and estimate() about rows; leave it to the trainer")


TRANSFORMS = Parts(
    {
        "align": "maporl.methods.m_grpo:Align",
        "broadcast_to_callees": "maporl.methods.matpo:BroadcastToCallees",
        "opponent_shaping": "maporl.methods.advantage_alignment:OpponentShaping",
        "step_merge": "maporl.methods.salt:StepMerge",
        "whiten": Whiten,
        "equal_shares": EqualShares,
        "end_of_failures": "maporl.methods.wideseek_r1:EndOfFailures",
        "duration": Duration,
        "drop_zeros": DropZeros,
        "drop_groups": "maporl.methods.at_grpo:DropGroups",
        "cumulative_kl": CumulativeKL,
    }
)
"""What one method alone uses is in :mod:`maporl.methods`, and imported when it is looked up."""


def build_transforms(config: AdvantageConfig, where: str = "advantage") -> list[Transform]:
    """Build the transforms that a configuration names in ``post``, in its order: a name, or ``{name: options}``.

    Raises:
        ConfigError: a name is unknown, or its options are wrong.
    """
    return build_named(config.post, TRANSFORMS, f"{where}.post", Transform)
