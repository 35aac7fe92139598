"""Reward rules turn scores into one credit per utterance. ``RULES`` names them all. Pure Python, no torch.

A rule is a frozen dataclass of its options. It is called with the dialogues of *one* question and their credits so far:
a dict ``{utterance id: credit}`` for each dialogue. It returns new dicts. An utterance that is missing from them is not
trained on. The rules are applied from left to right, and the first one receives the scores themselves. Those that one
method alone uses are in :mod:`maporl.methods`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar, Literal

from maporl.config import build_named
from maporl.config.imports import Parts
from maporl.config.schema import RewardSection
from maporl.rounding import difference
from maporl.text import check_names
from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import Checked, Positive, option

Credits = list[dict[int, float]]
Along = Literal["utterance", "turn", "dialogue", "question"]
"""What the credit of an utterance depends on: on nothing that is said after it, on its turn, on its whole dialogue, or
on all dialogues of its question."""


class Rule(Checked):
    """The base class of rules. A rule is a frozen dataclass of options that can be called.

    A derived class says with ``along`` what its credits depend on. A branching whose rewards are final refuses rules
    that look at what follows an utterance (:class:`maporl.rollout.branching.Branching`). The default is the whole
    dialogue, so that a new rule is refused rather than wrong.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """The columns that the protocol must record (:attr:`maporl.Protocol.records`)."""
    needs_verdicts: ClassVar[bool] = False
    """Whether it pays the verdicts of ``protocol.step_judge``."""
    along: ClassVar[Along] = "dialogue"
    """What the credit of an utterance depends on."""

    def at_update(self, update: int) -> "Rule":
        """Return the rule as it is in ``update``, counted from 1. By default it is this one."""
        return self

    @property
    def reads(self) -> frozenset[str]:
        """The named rewards that it reads beside the score. A source or the protocol must give each of them."""
        return frozenset()

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        """Return the changed credits of one question's ``dialogues``.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}: a rule defines __call__(dialogues, credits)")


def identity(dialogue: Dialogue, utterance: Utterance) -> tuple:
    """Return what an utterance is to all dialogues of its question that share it."""
    return (None, utterance.sample) if utterance.sample is not None else (dialogue.rollout, utterance.id)


def split_name(name: str) -> tuple[str, str]:
    """Return whose reward ``name`` means ("caller", "callees", "called" or "": its own), and the reward's name."""
    whose, _, reward = name.partition("/")
    return (whose, reward) if whose in ("caller", "callees", "called") else ("", name)


def along_names(*names: str) -> Along:
    """Return what rewards with these names depend on. Called utterances follow the utterance that calls them."""
    return "dialogue" if any(name.startswith(("callees/", "called/")) for name in names) else "utterance"


def named_reward(dialogue: Dialogue, utterance: Utterance, name: str) -> float:
    """Return a named reward of the utterance, its caller, its callees or all called utterances. Without it: 0."""
    whose, reward = split_name(name)
    if not whose:
        return utterance.rewards.get(name, 0.0)
    if whose == "caller":
        return 0.0 if utterance.caller is None else dialogue.utterances[utterance.caller].rewards.get(reward, 0.0)
    called = [u for u in dialogue.utterances if u.caller is not None]
    chosen = called if whose == "called" else [u for u in called if u.caller == utterance.id]
    values = [u.rewards[reward] for u in chosen if reward in u.rewards]
    return fmean(values) if values else 0.0


@dataclass(frozen=True)
class Own(Rule):
    """Every utterance keeps its own score."""

    missing: float | None = option(
        None, "The credit of utterances without a score, such as those of helpers. None: they have none."
    )

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        if self.missing is None:
            return credits
        return [
            dict.fromkeys(range(len(d.utterances)), self.missing) | credit
            for d, credit in zip(dialogues, credits, strict=True)
        ]


@dataclass(frozen=True)
class TeamMean(Rule):
    """Every utterance gets the mean of the dialogue's scores, or of the scores of its turn."""

    over: Literal["dialogue", "turn"] = option("dialogue", "The scores of the dialogue, or of the turn.")
    total = False

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return self.over

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            shared = {}
            for u in dialogue.utterances:
                values = [
                    credit[v.id]
                    for v in dialogue.utterances
                    if v.id in credit and (self.over == "dialogue" or v.turn == u.turn)
                ]
                if values:
                    shared[u.id] = math.fsum(values) / (1 if self.total else len(values))
            result.append(shared)
        return result


@dataclass(frozen=True)
class Sum(TeamMean):
    """Every utterance gets the sum of all scores, or of those of its turn (CORY, arXiv 2410.06101, eq. 4)."""

    total = True


def last_said(dialogue: Dialogue, credit: dict[int, float]) -> dict[int, float]:
    """Return the score of the last utterance that has one, by its number: several, if they were said at once."""
    order = dialogue.utterances[max(credit)].order if credit else None
    return {number: score for number, score in credit.items() if dialogue.utterances[number].order == order}


@dataclass(frozen=True)
class Last(Rule):
    """Every utterance gets the score of the last utterance that has one: the mean, if several were said at once."""

    to: Literal["all", "itself", "ends"] = option(
        "all",
        "Who gets it: all, the last utterance itself (MARFT), or the last one of each agent (ends), which ends what "
        "each agent did, so that `advantage.returns` carries it back. All others get 0.",
    )
    missing: float | None = option(
        None, "What all get in a dialogue in which nobody answers. None: they have no credit."
    )

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result: Credits = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            last, everybody = last_said(dialogue, credit), range(len(dialogue.utterances))
            if not last:
                result.append({} if self.missing is None else dict.fromkeys(everybody, self.missing))
                continue
            score, ends = fmean(last.values()), {u.agent: u.id for u in dialogue.utterances}.values()
            paid = {"all": dict.fromkeys(everybody, score), "itself": last, "ends": dict.fromkeys(ends, score)}[self.to]
            result.append(dict.fromkeys(everybody, 0.0) | paid)
        return result


@dataclass(frozen=True)
class ZeroSum(Rule):
    """Every utterance gets its agent's total in the dialogue minus the mean of the other agents' totals."""

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            totals: dict[str, float] = {}
            for u in (u for u in dialogue.utterances if u.id in credit):
                totals[u.agent] = totals.get(u.agent, 0.0) + credit[u.id]
            relative = {
                agent: difference(total, fmean(v for a, v in totals.items() if a != agent) if len(totals) > 1 else 0.0)
                for agent, total in totals.items()
            }
            result.append({u.id: relative[u.agent] for u in dialogue.utterances if u.id in credit})
        return result


@dataclass(frozen=True)
class BackPropagate(Rule):
    """An utterance gets the mean credit of the utterances that were shown it directly (MHGPO, arXiv 2506.02718).

    The rule works from the last utterance to the first, so credit passes back through several steps. An utterance that
    was shown to nobody keeps its own score.
    """

    how: Literal["mean", "max", "sum"] = option("mean", "How the credits are combined: mean, max or sum.")
    keep_own: bool = option(False, "Add an utterance's own score to the credit that it gets.")

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        combine: Any = {"mean": fmean, "max": max, "sum": math.fsum}[self.how]
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            worth = dict(credit)
            for u in reversed(dialogue.utterances):
                consumed = [worth[v.id] for v in dialogue.utterances if u.id in v.parents and v.id in worth]
                if consumed:
                    worth[u.id] = combine(consumed) + (credit.get(u.id, 0.0) if self.keep_own else 0.0)
            result.append(worth)
        return result


@dataclass(frozen=True)
class TreeMean(Rule):
    """Every utterance gets the mean of the last scores of all dialogues that share it (MALT's values)."""

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        ends = [last_said(dialogue, credit).values() for dialogue, credit in zip(dialogues, credits, strict=True)]
        leaves = [fmean(scores) if scores else None for scores in ends]
        shared: dict[tuple, list[float]] = {}
        for dialogue, leaf in zip(dialogues, leaves, strict=True):
            if leaf is not None:
                for u in dialogue.utterances:
                    shared.setdefault(identity(dialogue, u), []).append(leaf)
        return [
            {u.id: fmean(shared[identity(d, u)]) for u in d.utterances if identity(d, u) in shared} for d in dialogues
        ]


@dataclass(frozen=True)
class Mix(Rule):
    """The credit so far times ``credit``, plus ``constant``, plus a weighted sum of named rewards.

    With ``constant: -0.1`` and a weight of 0.1, what lacks a form costs 0.1, and what has it costs nothing
    (:class:`maporl.Refine`'s ``verdict_form``).

    Raises:
        ValueError: ``fade`` is below 1.
    """

    weights: dict[str, float] = option(
        help="The rewards by name: NAME for a reward of the utterance itself, caller/NAME for one of the utterance "
        "that called it, callees/NAME for the mean over the utterances that it called, or called/NAME for the "
        "mean over all utterances of the dialogue that were called."
    )
    credit: float = option(1.0, "What the credit so far is multiplied by.")
    roles: tuple[str, ...] = option((), "Change utterances in these roles only. Default: all.")
    fade: Positive | None = option(
        None,
        "The updates over which the weights and the constant fall in a straight line to 0, while `credit` stays: what "
        "helps at the beginning is paid less and less, and in the end only the result is (PARL, Kimi K2.5).",
    )
    constant: float = option(0.0, "What is added.")

    def at_update(self, update: int) -> "Mix":
        """Return the rule with the weights that it has in ``update``, counted from 1.

        >>> [Mix({"started": 0.2}, fade=10).at_update(update).weights["started"] for update in (1, 6, 11, 12)]
        [0.2, 0.1, 0.0, 0.0]
        """
        if self.fade is None:
            return self
        share = max(0.0, 1.0 - (update - 1) / self.fade)
        weights = {name: share * weight for name, weight in self.weights.items()}
        return replace(self, weights=weights, fade=None, constant=share * self.constant)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(split_name(name)[1] for name in self.weights)

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return along_names(*self.weights)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            mixed = dict(credit)
            for u in (u for u in dialogue.utterances if not self.roles or u.role in self.roles):
                parts = [weight * named_reward(dialogue, u, name) for name, weight in self.weights.items()]
                mixed[u.id] = self.credit * credit.get(u.id, 0.0) + math.fsum([self.constant, *parts])
            result.append(mixed)
        return result


@dataclass(frozen=True)
class Cost(Rule):
    """Subtracts ``per_token`` for every sampled token, but at most ``most`` in all."""

    per_token: float = option(0.001, "The cost of a token.")
    most: float | None = option(None, "The most that an utterance costs. None: no limit.")

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        def cost(u: Utterance) -> float:
            price = self.per_token * len(u.response_ids)
            return price if self.most is None else min(price, self.most)

        return [
            {u.id: credit[u.id] - cost(u) for u in d.utterances if u.id in credit}
            for d, credit in zip(dialogues, credits, strict=True)
        ]


@dataclass(frozen=True)
class Inherit(Rule):
    """An utterance that was called gets the credit of the utterance that called it (MATPO)."""

    needs = frozenset({"caller"})

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            inherited = dict(credit)
            for u in dialogue.utterances:
                if u.caller is not None and u.caller in inherited:
                    inherited[u.id] = inherited[u.caller]
            result.append(inherited)
        return result


RULES = Parts(
    {
        "own": Own,
        "team_mean": TeamMean,
        "sum": Sum,
        "last": Last,
        "complement": "maporl.methods.forum:Complement",
        "zero_sum": ZeroSum,
        "back_propagate": BackPropagate,
        "tree_mean": TreeMean,
        "mix": Mix,
        "cost": Cost,
        "gate": "maporl.methods.g_ra:Gate",
        "potential": "maporl.methods.potential:Potential",
        "convert": "maporl.methods.agon:Convert",
        "beyond_shown": "maporl.methods.mada_rl:BeyondShown",
        "short_and_right": "maporl.methods.mada_rl:ShortAndRight",
        "refute": "maporl.methods.rlac:Refute",
        "tier": "maporl.methods.ssl:Tier",
        "public_goods": "maporl.methods.mac_spgg:PublicGoods",
        "tournament": "maporl.methods.arenarl:Tournament",
        "redistribute": "maporl.methods.spa_rl:Redistribute",
        "inherit": Inherit,
        "margin": "maporl.methods.marti:Margin",
        "quality": "maporl.methods.marti:Quality",
        "tree_margin": "maporl.methods.mars2:TreeMargin",
        "counterfactual": "maporl.methods.ccpo:Counterfactual",
        "length_share": "maporl.methods.optima:LengthShare",
        "readability": "maporl.methods.optima:Readability",
        "prove": "maporl.methods.prover_verifier:Prove",
        "translate": "maporl.methods.prover_verifier:Translate",
        "consistency": "maporl.methods.rl_anything:Consistency",
    }
)
"""What one method alone uses is in :mod:`maporl.methods`, and imported when it is looked up."""


def build_rules(
    entries: Sequence[str | dict[str, dict[str, Any]]], where: str = "reward.rules", update: int = 1
) -> list[Rule]:
    """Build the rules that a configuration names, in its order, as they are in ``update``.

    Each entry is a name or ``{name: options}``.

    Raises:
        ConfigError: a name is unknown, its options are wrong, or what a rule ``needs`` or ``reads`` is not a set of
            names.
    """
    rules: list[Rule] = build_named(entries, RULES, where, Rule)
    for rule in rules:
        check_names(rule.needs, f"{where}: {type(rule).__name__}.needs")
        check_names(rule.reads, f"{where}: {type(rule).__name__}.reads")
    return [rule.at_update(update) for rule in rules]


def weighed(section: RewardSection) -> frozenset[str]:
    """Return the names of the rewards that the sources, the charges and the rules of a section read."""
    return frozenset(section.asked).union(*(rule.reads for rule in build_rules(section.rules)))
