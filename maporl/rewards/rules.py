"""Reward rules turn scores into one credit per utterance. ``RULES`` names them all. Pure Python, no torch.

:mod:`maporl.rewards.rule` has their contract.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from maporl.config import build_named
from maporl.config.schema import RewardSection
from maporl.rewards.consistency import Consistency
from maporl.rewards.counterfactual import Counterfactual
from maporl.rewards.economy import LengthShare, Readability
from maporl.rewards.labels import IMPLIED
from maporl.rewards.proving import Prove, Translate
from maporl.rewards.rule import Along, Credits, Rule
from maporl.rewards.tournament import eliminate
from maporl.rounding import ROUNDING, difference, exceeds
from maporl.text import check_names
from maporl.types import Dialogue, Utterance


@dataclass(frozen=True)
class Own(Rule):
    """Every utterance keeps its own score.

    If ``missing`` is given, utterances without a score, such as those of helpers, get this credit.
    """

    missing: float | None = None

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        if self.missing is None:
            return credits
        return [
            dict.fromkeys(range(len(d.utterances)), self.missing) | own
            for d, own in zip(dialogues, credits, strict=True)
        ]


@dataclass(frozen=True)
class TeamMean(Rule):
    """Every utterance gets the mean of the dialogue's scores, or of the scores of its turn (``over: turn``)."""

    over: Literal["dialogue", "turn"] = "dialogue"
    total = False

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return self.over

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            shared = {}
            for u in dialogue.utterances:
                values = [
                    own[v.id]
                    for v in dialogue.utterances
                    if v.id in own and (self.over == "dialogue" or v.turn == u.turn)
                ]
                if values:
                    shared[u.id] = math.fsum(values) / (1 if self.total else len(values))
            result.append(shared)
        return result


@dataclass(frozen=True)
class Sum(TeamMean):
    """Every utterance gets the sum of all scores, or of those of its turn (CORY, arXiv 2410.06101, eq. 4)."""

    total = True


@dataclass(frozen=True)
class Last(Rule):
    """Every utterance gets the score of the last utterance that has one.

    With ``to: itself`` the last utterance keeps its score and all others get 0 (MARFT). With ``to: ends`` the last utterance of
    each agent gets it and all others get 0: it ends what each agent did, and ``advantage.returns`` carries it back. If ``missing``
    is given, it is what all get in a dialogue in which nobody answers.
    """

    to: Literal["all", "itself", "ends"] = "all"
    missing: float | None = None

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result: Credits = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            last = max(own, default=None)
            if last is None:
                unscored = {} if self.missing is None else dict.fromkeys(range(len(dialogue.utterances)), self.missing)
                result.append(unscored)
                continue
            ends = {u.agent: u.id for u in dialogue.utterances}.values() if self.to == "ends" else [last]
            others = own[last] if self.to == "all" else 0.0
            result.append(dict.fromkeys(range(len(dialogue.utterances)), others) | dict.fromkeys(ends, own[last]))
        return result


@dataclass(frozen=True)
class Complement(Rule):
    """An utterance in one of the ``roles`` gets 1 minus the mean credit of what it was shown (CoMAS's evaluators)."""

    roles: tuple[str, ...]

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            changed = dict(own)
            for u in (u for u in dialogue.utterances if u.role in self.roles):
                shown = [own[p] for p in u.parents if p in own and dialogue.utterances[p].role not in self.roles]
                if shown:
                    changed[u.id] = difference(1.0, fmean(shown))
            result.append(changed)
        return result


@dataclass(frozen=True)
class ZeroSum(Rule):
    """Every utterance gets its agent's total in the dialogue minus the mean of the other agents' totals."""

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            totals: dict[str, float] = {}
            for u in (u for u in dialogue.utterances if u.id in own):
                totals[u.agent] = totals.get(u.agent, 0.0) + own[u.id]
            relative = {
                agent: difference(total, fmean(v for a, v in totals.items() if a != agent) if len(totals) > 1 else 0.0)
                for agent, total in totals.items()
            }
            result.append({u.id: relative[u.agent] for u in dialogue.utterances if u.id in own})
        return result


@dataclass(frozen=True)
class BackPropagate(Rule):
    """An utterance gets the mean credit of the utterances that were shown it directly (MHGPO, arXiv 2506.02718).

    ``how`` may also be ``max`` or ``sum``. The rule works from the last utterance to the first, so credit passes back
    through several steps. An utterance that was shown to nobody keeps its own score. ``keep_own`` adds an utterance's
    own score to the credit that it gets.
    """

    how: Literal["mean", "max", "sum"] = "mean"
    keep_own: bool = False

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        combine: Any = {"mean": fmean, "max": max, "sum": math.fsum}[self.how]
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            worth = dict(own)
            for u in reversed(dialogue.utterances):
                consumed = [worth[v.id] for v in dialogue.utterances if u.id in v.parents and v.id in worth]
                if consumed:
                    worth[u.id] = combine(consumed) + (own.get(u.id, 0.0) if self.keep_own else 0.0)
            result.append(worth)
        return result


@dataclass(frozen=True)
class TreeMean(Rule):
    """Every utterance gets the mean of the last scores of all dialogues that share it (MALT's values)."""

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        leaves = [own[max(own)] if own else None for own in credits]
        shared: dict[tuple, list[float]] = {}
        for dialogue, leaf in zip(dialogues, leaves, strict=True):
            if leaf is not None:
                for u in dialogue.utterances:
                    shared.setdefault(_identity(dialogue, u), []).append(leaf)
        return [
            {u.id: fmean(shared[_identity(d, u)]) for u in d.utterances if _identity(d, u) in shared} for d in dialogues
        ]


@dataclass(frozen=True)
class Mix(Rule):
    """The credit so far times ``credit``, plus ``constant``, plus a weighted sum of named rewards.

    A name in ``weights`` is ``NAME`` for a reward of the utterance itself, ``caller/NAME`` for one of the utterance
    that called it, ``callees/NAME`` for the mean over the utterances that it called, or ``called/NAME`` for the mean
    over all utterances of the dialogue that were called. ``roles`` restricts the rule to utterances in these roles; by
    default it changes all. With ``constant: -0.1`` and a weight of 0.1, what lacks a form costs 0.1, and what has it costs nothing
    (:class:`maporl.Refine`'s ``verdict_form``). With ``fade`` the weights and the constant fall in a straight line to 0 over so many updates, and ``credit``
    stays: what helps at the beginning is paid less and less, and in the end only the result is (PARL, Kimi K2.5).

    Raises:
        ValueError: ``fade`` is below 1.
    """

    weights: dict[str, float]
    credit: float = 1.0
    roles: tuple[str, ...] = ()
    fade: int | None = None
    constant: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.fade is not None and self.fade < 1:
            raise ValueError(f"fade: expected a number of updates of at least 1, got {self.fade}")

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
        return frozenset(_split(name)[1] for name in self.weights)

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return _along_names(*self.weights)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            mixed = dict(own)
            for u in (u for u in dialogue.utterances if not self.roles or u.role in self.roles):
                parts = [weight * _named(dialogue, u, name) for name, weight in self.weights.items()]
                mixed[u.id] = self.credit * own.get(u.id, 0.0) + math.fsum([self.constant, *parts])
            result.append(mixed)
        return result


@dataclass(frozen=True)
class Cost(Rule):
    """Subtracts ``per_token`` for every sampled token, but at most ``most`` in all (None: no limit)."""

    per_token: float = 0.001
    most: float | None = None

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        def cost(u: Utterance) -> float:
            price = self.per_token * len(u.response_ids)
            return price if self.most is None else min(price, self.most)

        return [
            {u.id: own[u.id] - cost(u) for u in d.utterances if u.id in own}
            for d, own in zip(dialogues, credits, strict=True)
        ]


@dataclass(frozen=True)
class Gate(Rule):
    """The sum of the named rewards in ``order`` of priority (G-RA, arXiv 2508.10548).

    A reward counts only if every reward before it is above ``threshold``. Each must therefore vary while those before it
    are above it. If a reward of higher priority implies it, the gate only counts that one twice.

    Raises:
        ValueError: the order is empty, or names a reward after one that implies it.
    """

    order: tuple[str, ...]
    threshold: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not self.order:
            raise ValueError("order: expected the names of rewards, the most important first, got none")
        for place, lower in enumerate(self.order):
            for higher in self.order[:place]:
                if lower == higher or (self.threshold >= 0 and lower in IMPLIED.get(higher, ())):
                    raise ValueError(
                        f"order: {lower!r} never varies behind {higher!r}: whenever {higher!r} is above the threshold "
                        f"{self.threshold}, {lower!r} is the same, so the gate adds nothing; name a reward that varies "
                        "there, such as brevity"
                    )

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(_split(name)[1] for name in self.order)

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return _along_names(*self.order)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [
            {u.id: self.gated([_named(d, u, name) for name in self.order]) for u in d.utterances if u.id in own}
            for d, own in zip(dialogues, credits, strict=True)
        ]

    def gated(self, values: Sequence[float]) -> float:
        """Return the gated sum of ``values``, given in order of priority.

        >>> [Gate(("outcome", "steps")).gated((outcome, 0.15)) for outcome in (-0.5, 0.0, 1.0)]
        [-0.5, 0.0, 1.15]
        """
        total = 0.0
        for value in values:
            total += value
            if not exceeds(value, self.threshold):
                break
        return total


@dataclass(frozen=True)
class Tier(Rule):
    """``credit + alpha * zone / zones`` with ``zone = ceil(zones * proximity)`` (SSL, arXiv 2601.22491, as
    reconstructed).

    ``proximity`` names a reward in [0, 1]. Noise within a zone does not change the credit, so it causes no advantage.
    """

    proximity: str
    zones: int = 4
    alpha: float = 0.5

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({_split(self.proximity)[1]})

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return _along_names(self.proximity)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [
            {u.id: own[u.id] + self.bonus(_named(d, u, self.proximity)) for u in d.utterances if u.id in own}
            for d, own in zip(dialogues, credits, strict=True)
        ]

    def bonus(self, proximity: float) -> float:
        """Return what is added to the credit at this ``proximity``.

        >>> [1 + Tier("near").bonus(math.exp(-d * d / 2)) for d in (0, 0.8, 2)]
        [1.5, 1.375, 1.125]
        """
        return self.alpha * math.ceil(self.zones * proximity * (1 - ROUNDING)) / self.zones


@dataclass(frozen=True)
class PublicGoods(Rule):
    """``R_i = -cost c_i^2 + synergy c_i sum_{j<i} c_j + (multiplier/n) S - penalty [S < threshold]``.

    The sum runs over the n utterances of a dialogue in order. c are their own scores, and S is the last score. The
    payoff is inspired by MAC-SPGG (arXiv 2508.02076) and reconstructed.

    Later speakers earn more for equal effort, so compare agents by position (``advantage.key`` with ``agent``).
    """

    cost: float = 0.1
    synergy: float = 0.5
    multiplier: float = 1.8
    penalty: float = 0.5
    threshold: float = 0.7

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [dict(zip(sorted(own), self.pay([own[i] for i in sorted(own)]), strict=True)) for own in credits]

    def pay(self, efforts: Sequence[float], outcome: float | None = None) -> list[float]:
        """Return the payoff of each effort, in order. ``outcome`` is S; by default it is the last effort.

        >>> [round(r, 3) for r in PublicGoods().pay((0.6, 0.7, 0.8), 0.8)]
        [0.444, 0.641, 0.936]
        >>> [round(r, 3) for r in PublicGoods().pay((0.6, 0.7, 0.8), 0.5)]
        [-0.236, -0.039, 0.256]
        """
        if not efforts:
            return []
        score = efforts[-1] if outcome is None else outcome
        common = self.multiplier / len(efforts) * score - (self.penalty if exceeds(self.threshold, score) else 0.0)
        return [-self.cost * c * c + self.synergy * c * math.fsum(efforts[:i]) + common for i, c in enumerate(efforts)]


@dataclass(frozen=True)
class Tournament(Rule):
    """Every utterance of a dialogue gets ``1 - rank / (N - 1)`` (ArenaRL, arXiv 2601.06487).

    The rank is that of the dialogue's last score among the N dialogues of its question, by seeded single elimination.
    Each dialogue first meets the first one; these matches give the seeds. In later rounds the best meets the worst. A
    tie goes to the dialogue that is listed first.
    """

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        scores = [own[max(own)] if own else -math.inf for own in credits]
        ranks = eliminate(len(scores), lambda a, b: (scores[a], scores[b]))
        worth = [1.0 - rank / max(1, len(scores) - 1) for rank in ranks]
        return [dict.fromkeys(range(len(d.utterances)), w) for d, w in zip(dialogues, worth, strict=True)]


@dataclass(frozen=True)
class Redistribute(Rule):
    """Every utterance gets ``alpha`` times the reward named ``by``, an estimate of progress (SPA-RL, arXiv 2505.20732).

    If ``grounding`` names another reward, ``beta`` times that reward is added.
    """

    by: str
    alpha: float = 1.0
    grounding: str | None = None
    beta: float = 0.5

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(_split(name)[1] for name in (self.by, self.grounding) if name is not None)

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return _along_names(self.by, self.grounding or "")

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        def step(d: Dialogue, u: Utterance) -> float:
            ground = self.beta * _named(d, u, self.grounding) if self.grounding else 0.0
            return self.alpha * _named(d, u, self.by) + ground

        return [{u.id: step(d, u) for u in d.utterances} for d in dialogues]


@dataclass(frozen=True)
class Inherit(Rule):
    """An utterance that was called gets the credit of the utterance that called it (MATPO)."""

    needs = frozenset({"caller"})

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            inherited = dict(own)
            for u in dialogue.utterances:
                if u.caller is not None and u.caller in inherited:
                    inherited[u.id] = inherited[u.caller]
            result.append(inherited)
        return result


@dataclass(frozen=True)
class Margin(Rule):
    """MARTI's margin shaping (after MAPoRL): ``R + alpha (R - Q)`` plus ``beta`` times the agent's last score.

    R is the utterance's score, and Q is the mean of all scores in earlier turns. ``of: all`` takes Q over all agents,
    as MARTI's code does in a debate; ``of: own`` takes it over the agent's own scores, as MARTI's documents say. The
    first turn has no earlier scores, so it is not shaped. With a ``beta``, which is 0.5 there, the names are margin_with_outcome and
    quality_with_outcome in MARTI, and the first turn gets that term too.
    """

    alpha: float = 0.5
    beta: float = 0.0
    of: Literal["all", "own"] = "all"

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return "utterance" if self.beta == 0 else "dialogue"

    def shaped(self, score: float, quality: float) -> float:
        """Return the shaped score, before the agent's last score is added."""
        return score + self.alpha * (score - quality)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, own in zip(dialogues, credits, strict=True):
            last = {u.agent: own[u.id] for u in dialogue.utterances if u.id in own}
            shaped = {}
            for u in (u for u in dialogue.utterances if u.id in own):
                earlier = [
                    own[v.id]
                    for v in dialogue.utterances
                    if v.id in own
                    and v.turn < u.turn
                    and v.order < u.order
                    and (self.of == "all" or v.agent == u.agent)
                ]
                shaped[u.id] = self.shaped(own[u.id], fmean(earlier)) if earlier else own[u.id]
                shaped[u.id] += self.beta * last[u.agent]
            result.append(shaped)
        return result


@dataclass(frozen=True)
class Quality(Margin):
    """MARTI's quality shaping: ``R + alpha (Q R - (1 - Q)(1 - R))``. Everything else is as in :class:`Margin`."""

    def shaped(self, score: float, quality: float) -> float:
        """Return the shaped score, before the agent's last score is added."""
        return score + self.alpha * (quality * score - (1 - quality) * (1 - score))


@dataclass(frozen=True)
class TreeMargin(Rule):
    """``r + alpha (r - b)`` for an utterance of a tree, with ``b = (1 - siblings) p + siblings s`` (MARS², arXiv 2604.14564).

    p is the shaped credit of what the utterance followed, and s is the mean score of the others that followed the same. What
    followed the question has no p, and an only child has no s; then b is the other of the two, and without both the score stays.

    Raises:
        ValueError: ``siblings`` is not from 0 to 1.
    """

    alpha: float = 0.5
    siblings: float = 0.5

    along = "utterance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.siblings <= 1:
            raise ValueError(f"tree_margin: siblings: expected a share from 0 to 1, got {self.siblings}")

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        scores: dict[tuple, float] = {}
        followed: dict[tuple, tuple | None] = {}
        for dialogue, own in zip(dialogues, credits, strict=True):
            for u in (u for u in dialogue.utterances if u.id in own):
                name = _identity(dialogue, u)
                before = [v for v in dialogue.utterances if v.id in own and v.order < u.order]
                scores[name], followed[name] = own[u.id], _identity(dialogue, before[-1]) if before else None
        children: dict[tuple | None, list[tuple]] = {}
        for name, parent in followed.items():
            children.setdefault(parent, []).append(name)
        shaped: dict[tuple, float] = {}
        for name, parent in followed.items():  # in a dialogue, an utterance stands behind what it followed
            others = [scores[other] for other in children[parent] if other != name]
            sides = [] if parent is None else [(1 - self.siblings, shaped[parent])]
            sides += [(self.siblings, fmean(others))] if others else []
            base = (
                math.fsum(w * side for w, side in sides) if len(sides) == 2 else sides[0][1] if sides else scores[name]
            )
            shaped[name] = scores[name] + self.alpha * (scores[name] - base)
        return [
            {u.id: shaped[_identity(d, u)] for u in d.utterances if u.id in own}
            for d, own in zip(dialogues, credits, strict=True)
        ]


RULES: dict[str, Any] = {
    "own": Own,
    "team_mean": TeamMean,
    "sum": Sum,
    "last": Last,
    "complement": Complement,
    "zero_sum": ZeroSum,
    "back_propagate": BackPropagate,
    "tree_mean": TreeMean,
    "mix": Mix,
    "cost": Cost,
    "gate": Gate,
    "tier": Tier,
    "public_goods": PublicGoods,
    "tournament": Tournament,
    "redistribute": Redistribute,
    "inherit": Inherit,
    "margin": Margin,
    "quality": Quality,
    "tree_margin": TreeMargin,
    "counterfactual": Counterfactual,
    "length_share": LengthShare,
    "readability": Readability,
    "prove": Prove,
    "translate": Translate,
    "consistency": Consistency,
}


def build_rules(
    entries: Sequence[str | dict[str, dict[str, Any]]], where: str = "reward.rules", update: int = 1
) -> list[Rule]:
    """Build the rules that a configuration names, in its order, as they are in ``update``.

    Each entry is a name or ``{name: options}``.

    Raises:
        ConfigError: a name is unknown, its options are wrong, or what a rule ``needs`` or ``reads`` is not a set of names.
    """
    rules: list[Rule] = build_named(entries, RULES, where, Rule)
    for rule in rules:
        check_names(rule.needs, f"{where}: {type(rule).__name__}.needs")
        check_names(rule.reads, f"{where}: {type(rule).__name__}.reads")
    return [rule.at_update(update) for rule in rules]


def weighed(section: RewardSection) -> frozenset[str]:
    """Return the names of the rewards that the sources and the rules of a section read."""
    return frozenset(section.sources).union(*(rule.reads for rule in build_rules(section.rules)))


def _identity(dialogue: Dialogue, utterance: Utterance) -> tuple:
    return (None, utterance.sample) if utterance.sample is not None else (dialogue.rollout, utterance.id)


def _split(name: str) -> tuple[str, str]:
    """Return whose reward ``name`` means ("caller", "callees", "called" or "": its own), and the reward's name."""
    whose, _, reward = name.partition("/")
    return (whose, reward) if whose in ("caller", "callees", "called") else ("", name)


def _along_names(*names: str) -> Along:
    """Return what rewards with these names depend on. Called utterances follow the utterance that calls them."""
    return "dialogue" if any(name.startswith(("callees/", "called/")) for name in names) else "utterance"


def _named(dialogue: Dialogue, utterance: Utterance, name: str) -> float:
    """Return a named reward of the utterance, its caller, its callees or all called utterances. Without it: 0."""
    whose, reward = _split(name)
    if not whose:
        return utterance.rewards.get(name, 0.0)
    if whose == "caller":
        return 0.0 if utterance.caller is None else dialogue.utterances[utterance.caller].rewards.get(reward, 0.0)
    called = [u for u in dialogue.utterances if u.caller is not None]
    chosen = called if whose == "called" else [u for u in called if u.caller == utterance.id]
    values = [u.rewards[reward] for u in chosen if reward in u.rewards]
    return fmean(values) if values else 0.0
