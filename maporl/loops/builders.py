"""Builders make the rows of a data set from scored dialogues. ``BUILDERS`` names them. No torch.

The value of an utterance is its credit, so reward rules say what a builder reads: with ``tree_mean``, it is the mean
over all dialogues that share the utterance. An utterance that dialogues share is one row. Utterances that may not be
trained on, and those of engines without token ids, make no rows.
"""

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from maporl.errors import RunError
from maporl.loops.rows import Pair, Row
from maporl.text import check_placeholders
from maporl.types import Dialogue, Utterance

STRICT = ConfigDict(extra="forbid")
Number = Annotated[float, Field(allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]


class Builder(ABC):
    """Makes rows of scored dialogues. It depends on nothing else, so the same dialogues give the same rows.

    Attributes:
        makes: single rows, pairs, or rows that are called good or bad.
    """

    makes: ClassVar[Literal["single rows", "pairs", "signed rows"]] = "single rows"

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
    makes = "pairs"

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
class Signs(Builder):
    """Every utterance. It is good if its value is greater than ``above``, and otherwise bad (KTO, arXiv 2402.01306)."""

    above: Number = 0.5
    makes = "signed rows"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        return [replace(row, good=row.value > self.above) for row, _ in said(dialogues, roles)]


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
            value = worth(dialogue)
            if value is not None and (dialogue.prompt not in best or value > best[dialogue.prompt][0]):
                best[dialogue.prompt] = value, dialogue
        kept = selected([value for value, _ in best.values()], self.keep, self.skip, self.at_least)
        ranked = list(best.values())
        return [row for row, _ in said([ranked[number][1] for number in kept], roles)]


@dataclass(frozen=True, config=STRICT)
class Gap(Builder):
    """Pairs of dialogues of one question, of which one is worth more than the other (MADPO's joint answers, CoMLRL).

    The worth of a dialogue is the mean of its utterances' values. A pair of dialogues makes a pair of answers for each
    agent, unless both are equal. ``reward_gap`` takes the pairs with the largest difference in worth first, and ``random``
    takes any. At most ``per_question`` pairs of dialogues are taken; None takes all.
    """

    select: Literal["reward_gap", "random"] = "reward_gap"
    per_question: Annotated[int, Field(ge=1)] | None = 16
    makes = "pairs"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Pair]:
        """Return the pairs.

        Raises:
            RunError: an agent spoke more than once in a dialogue, or was shown something else in another one.
        """
        questions: dict[int, list[Dialogue]] = defaultdict(list)
        for dialogue in dialogues:
            if worth(dialogue) is not None:
                questions[dialogue.prompt].append(dialogue)
        return [
            Pair(answer, other)
            for prompt, played in questions.items()
            for better, worse in self.chosen([worth(d) for d in played], f"{prompt}/{played[0].example.id}")  # type: ignore[misc]
            for answer, other in _answers(played[better], played[worse], roles)
            if differ(answer, other)
        ]

    def chosen(self, values: Sequence[float], name: str) -> list[tuple[int, int]]:
        """Return the selected pairs of numbers of ``values``, the larger value first. ``name`` decides chance."""
        numbers = range(len(values))
        pairs = [
            (a, b) if values[a] > values[b] else (b, a)
            for a in numbers
            for b in numbers[a + 1 :]
            if values[a] != values[b]
        ]
        pairs.sort(key=lambda pair: (values[pair[1]] - values[pair[0]], pair))
        if self.select == "random":
            random.Random(name).shuffle(pairs)
        return pairs[: self.per_question]


@dataclass(frozen=True, config=STRICT)
class Flatten(Builder):
    """Whole dialogues as one text of one policy, which learns to play all roles (Chain-of-Agents, arXiv 2508.13167).

    Everything that was said stands in ``form``, in the order of speaking, and what calls returned stands in ``observation`` after
    the words that called. What calls returned bears no loss. With ``roles`` only what was said in them bears loss. The text answers the
    question as the task puts it, after the system prompt of the agent that speaks with the policy.

    Taken are dialogues whose last answer is worth more than ``above`` and that have at least ``least`` utterances, and of
    each question at most ``per_question``, the first ones. None takes all.
    """

    into: str
    form: str = "<{name}>{text}</{name}>"
    observation: str = "<observation>{text}</observation>"
    above: Number = 0.5
    least: Annotated[int, Field(ge=1)] = 2
    per_question: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self):
        check_placeholders(self.form, ("name", "text"))
        check_placeholders(self.observation, ("name", "text"))

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        taken: dict[int, int] = defaultdict(int)
        rows = []
        for dialogue in dialogues:
            answers = [u.rewards["credit"] for u in dialogue.answers() if "credit" in u.rewards]
            if not answers or answers[-1] <= self.above or len(dialogue.utterances) < self.least:
                continue
            taken[dialogue.prompt] += 1
            if self.per_question is not None and taken[dialogue.prompt] > self.per_question:
                continue
            place = (dialogue.prompt, dialogue.rollout, 0)
            pieces, example = tuple(self.pieces(dialogue, roles)), dialogue.example
            rows.append(
                Row(
                    self.into,
                    self.into,
                    self.into,
                    example.id,
                    [],
                    [],
                    answers[-1],
                    place,
                    pieces=pieces,
                    example=example,
                )
            )
        return rows

    def pieces(self, dialogue: Dialogue, roles: Collection[str] = ()) -> Iterator[tuple[str, bool]]:
        """Yield the texts of a dialogue, each with whether it bears loss."""
        for u in dialogue.utterances:
            role = u.role or u.agent
            yield self.form.format(name=role, text=u.text), not roles or role in roles
            for call in u.calls:
                if call.result is not None:
                    yield self.observation.format(name=call.name, text=call.result.text), False


BUILDERS: dict[str, type[Builder]] = {
    "threshold": Threshold,
    "siblings": Siblings,
    "best_of": BestOf,
    "gap": Gap,
    "signs": Signs,
    "flatten": Flatten,
}
"""Name -> builder."""


def worth(dialogue: Dialogue) -> float | None:
    """Return the mean of the values of a dialogue's utterances, or None if none has a value."""
    values = [u.rewards["credit"] for u in dialogue.utterances if "credit" in u.rewards]
    return sum(values) / len(values) if values else None


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
        RunError: their prompts differ, so they cannot be compared.
    """
    if one.prompt_ids != other.prompt_ids:
        raise RunError(
            f"question {one.question!r}: {one.agent} was shown different tokens at {one.place} and {other.place}, so what "
            "was said there makes no pair; pair with the builder siblings, and sample with branching.how: fork_every"
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


def _answers(better: Dialogue, worse: Dialogue, roles: Collection[str]) -> list[tuple[Row, Row]]:
    """Return what each agent said in two dialogues, as rows."""
    found = []
    for dialogue in (better, worse):
        own: dict[str, Row] = {}
        for row, _ in said([dialogue], roles):
            if row.agent in own:
                raise RunError(
                    f"question {row.question!r}: {row.agent} spoke more than once in a dialogue, and the builder gap compares "
                    "single answers; use a protocol in which each agent speaks once, or the builder siblings"
                )
            own[row.agent] = row
        found.append(own)
    return [(found[0][agent], found[1][agent]) for agent in found[0] if agent in found[1]]


def _row(dialogue: Dialogue, u: Utterance, role: str) -> Row:
    place = (dialogue.prompt, dialogue.rollout, u.id)
    ids = u.prompt_ids, u.response_ids
    return Row(u.policy, u.agent, role, dialogue.example.id, *ids, u.rewards["credit"], place, not u.stop.whole)


def _identity(dialogue: Dialogue, u: Utterance) -> tuple:
    return (None, u.sample) if u.sample is not None else (dialogue.rollout, u.id)
