"""Builders make the rows of a data set from scored dialogues. ``BUILDERS`` names them. No torch.

The value of an utterance is its credit, so reward rules say what a builder reads: with ``tree_mean``, it is the mean
over all dialogues that share the utterance. An utterance that dialogues share is one row. Utterances that may not be
trained on, and those of engines without token ids, make no rows.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from maporl.loops.rows import Pair, Row
from maporl.types import Dialogue, Utterance

STRICT = ConfigDict(extra="forbid")
Number = Annotated[float, Field(allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]


class Builder(ABC):
    """Makes rows of scored dialogues. It depends on nothing else, so the same dialogues give the same rows.

    Attributes:
        pairs: whether the rows are pairs.
    """

    pairs: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row] | list[Pair]:
        """Return the rows of what was said in ``roles``, or in all roles if ``roles`` is empty."""


@dataclass(frozen=True, config=STRICT)
class Threshold(Builder):
    """Every utterance whose value is greater than ``above`` (MALT's data for SFT, arXiv 2412.01928)."""

    above: Number = 0.5

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        return [row for row, _ in said(dialogues, roles) if row.value > self.above]


@dataclass(frozen=True, config=STRICT)
class Siblings(Builder):
    """Pairs of utterances that were sampled after the same words (MALT's data for DPO, arXiv 2412.01928).

    The value of the chosen one is greater than ``above``, and that of the rejected one is not. All such pairs of one
    parent are made, except pairs of equal completions.
    """

    above: Number = 0.5
    pairs = True

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Pair]:
        families: dict[tuple, list[Row]] = defaultdict(list)
        for row, parent in said(dialogues, roles):
            families[(*parent, row.agent)].append(row)
        return [
            Pair(chosen, rejected)
            for family in families.values()
            for chosen in family
            if chosen.value > self.above
            for rejected in family
            if rejected.value <= self.above and differ(chosen, rejected)
        ]


@dataclass(frozen=True, config=STRICT)
class BestOf(Builder):
    """The best dialogue of every question (Optima's data for iSFT, arXiv 2410.08115).

    The worth of a dialogue is the mean of its utterances' values. The best dialogues of all questions are sorted by it.
    The first ``skip`` of them are left out, as a share, and those after the share ``keep``. Of the rest, those are taken
    that are worth at least ``at_least``.
    """

    keep: Part = 0.7
    skip: Annotated[float, Field(ge=0, lt=1)] = 0.0
    at_least: Number = 0.0

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        best: dict[int, tuple[float, Dialogue]] = {}
        for dialogue in dialogues:
            values = [u.rewards["credit"] for u in dialogue.utterances if "credit" in u.rewards]
            if values:
                worth = sum(values) / len(values)
                if dialogue.prompt not in best or worth > best[dialogue.prompt][0]:
                    best[dialogue.prompt] = worth, dialogue
        kept = selected([worth for worth, _ in best.values()], self.keep, self.skip, self.at_least)
        ranked = list(best.values())
        return [row for row, _ in said([ranked[number][1] for number in kept], roles)]


BUILDERS: dict[str, type[Builder]] = {"threshold": Threshold, "siblings": Siblings, "best_of": BestOf}
"""Name -> builder."""


def selected(values: Sequence[float], keep: float, skip: float = 0.0, at_least: float = float("-inf")) -> list[int]:
    """Return the numbers of the selected ``values``, best first.

    The share is taken first: ranks from ``skip`` to ``keep`` of all. The threshold ``at_least`` comes after it.
    """
    order = sorted(range(len(values)), key=lambda number: -values[number])
    shares = order[round(skip * len(order)) : round(keep * len(order))]
    return [number for number in shares if values[number] >= at_least]


def differ(one: Row, other: Row) -> bool:
    """Return whether two rows have different completions.

    Raises:
        ValueError: their prompts differ, so they cannot be compared.
    """
    if one.prompt_ids != other.prompt_ids:
        raise ValueError(
            f"question {one.question!r}: {one.agent} was shown different tokens at {one.place} and {other.place}, so what "
            "was said there makes no pair; sample with branching.how: fork_every"
        )
    return one.completion_ids != other.completion_ids


def said(dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[tuple[Row, tuple]]:
    """Return a row for every utterance that was said in ``roles``, with the identities of all words before it."""
    found: dict[tuple, tuple[Row, tuple]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            role = u.role or u.agent
            if not u.trainable or not u.response_ids or "credit" not in u.rewards or (roles and role not in roles):
                continue
            before = (dialogue.prompt, *(_identity(dialogue, v) for v in dialogue.utterances if v.order < u.order))
            key = (dialogue.prompt, *_identity(dialogue, u))
            found.setdefault(key, (_row(dialogue, u, role), before))
    return list(found.values())


def _row(dialogue: Dialogue, u: Utterance, role: str) -> Row:
    place = (dialogue.prompt, dialogue.rollout, u.id)
    ids = u.prompt_ids, u.response_ids
    return Row(u.policy, u.agent, role, dialogue.example.id, *ids, u.rewards["credit"], place, not u.stop.whole)


def _identity(dialogue: Dialogue, u: Utterance) -> tuple:
    return (None, u.sample) if u.sample is not None else (dialogue.rollout, u.id)
