"""The rows of a loop's data sets: what a policy said as token ids, as they were sampled. No torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from maporl.types import Example


@dataclass(frozen=True)
class Row:
    """One utterance to learn from.

    Args:
        policy: the policy that said it, and is trained on it.
        agent: the agent.
        role: the role in which it spoke, or the agent's name.
        question: the id of the question.
        prompt_ids: the token ids of everything that the agent saw.
        completion_ids: the sampled token ids. A completion that was cut off has no EOS.
        value: the utterance's credit.
        place: where it was said: the number of the question, of the dialogue, and of the utterance.
        cut: whether the completion was cut off.
        round: the round in which it was sampled.
        good: whether it is called good or bad, for KTO.
        bears_loss: for each token of the completion, whether it bears loss. None: all do.
        pieces: the completion as texts, each with whether it bears loss, if the policy's tokenizer must encode it yet
            (:mod:`maporl.loops.run_stage`).
        example: the question that the prompt asks, if it must be encoded too.
    """

    policy: str
    agent: str
    role: str
    question: str
    prompt_ids: list[int]
    completion_ids: list[int]
    value: float
    place: tuple[int, int, int]
    cut: bool = False
    round: int = 1
    good: bool | None = None
    bears_loss: list[bool] | None = None
    pieces: tuple[tuple[str, bool], ...] = ()
    example: Example | None = None


@dataclass(frozen=True)
class Pair:
    """Two utterances of one policy: the ``chosen`` one is preferred to the ``rejected`` one."""

    chosen: Row
    rejected: Row

    @property
    def policy(self) -> str:
        """The policy that said both."""
        return self.chosen.policy

    @property
    def together(self) -> tuple[int, int, int, int]:
        """The round, the question and the two dialogues. All agents' pairs of these dialogues have the same."""
        return (self.chosen.round, *self.chosen.place[:2], self.rejected.place[1])


@dataclass(frozen=True)
class Comparison:
    """Two whole dialogues on a question, of which the ``chosen`` one is worth ``gap`` more.

    Args:
        example: the question.
        chosen: what was said in the better dialogue, as a verifier reads it.
        rejected: what was said in the other one.
        gap: the difference of their worths.
        place: the number of the question, and those of both dialogues.
        round: the round in which they were sampled.
    """

    example: Example
    chosen: str
    rejected: str
    gap: float
    place: tuple[int, int, int]
    round: int = 1


@dataclass(frozen=True)
class TrajectoryPair:
    """All that one policy said in two dialogues on a question, of which the ``chosen`` one is worth ``gap`` more.

    Args:
        example: the question.
        chosen: what the policy said in the better dialogue, in order.
        rejected: what it said in the other one.
        gap: the difference of the dialogues' worths.
    """

    example: Example
    chosen: list[Row]
    rejected: list[Row]
    gap: float

    @property
    def policy(self) -> str:
        """The policy that said all of it."""
        return self.chosen[0].policy

    @property
    def together(self) -> tuple[int, int, int, int]:
        """The round, the question and the two dialogues. All policies' pairs of these dialogues have the same."""
        return (self.chosen[0].round, *self.chosen[0].place[:2], self.rejected[0].place[1])


AnyRow = Row | Pair | Comparison | TrajectoryPair


def of_round(rows: Sequence[AnyRow], number: int) -> list[AnyRow]:
    """Return the rows with the number of the round in which they were sampled."""

    def stamped(row: AnyRow) -> AnyRow:
        if isinstance(row, Pair):
            return Pair(replace(row.chosen, round=number), replace(row.rejected, round=number))
        if isinstance(row, TrajectoryPair):
            chosen, rejected = ([replace(r, round=number) for r in side] for side in (row.chosen, row.rejected))
            return replace(row, chosen=chosen, rejected=rejected)
        return replace(row, round=number)

    return [stamped(row) for row in rows]


def written(rows: Sequence[AnyRow]) -> str:
    """Return the rows as lines of JSON."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def described(rows: Sequence[Row | Pair]) -> dict[str, Any]:
    """Return what a manifest says of a policy's rows.

    These are their number and a hash, the mean number of tokens, and the share that was cut off. Of pairs, these are
    given for both sides, with the mean gap between the values. Of rows for KTO, it is also said how many are good.
    """
    about: dict[str, Any] = {"rows": len(rows), "sha256": hashlib.sha256(written(rows).encode()).hexdigest()}
    pairs = [row for row in rows if isinstance(row, Pair)]
    sides = {"": [row for row in rows if isinstance(row, Row)]}
    if pairs:
        sides = {"chosen_": [pair.chosen for pair in pairs], "rejected_": [pair.rejected for pair in pairs]}
        about["mean_gap"] = fmean(pair.chosen.value - pair.rejected.value for pair in pairs)
    if any(row.good is not None for row in sides.get("", ())):
        about["good"] = sum(bool(row.good) for row in sides[""])
    for side, completions in sides.items():
        if completions:
            about[f"{side}mean_tokens"] = fmean(len(row.completion_ids) for row in completions)
            about[f"{side}share_cut_off"] = fmean(row.cut for row in completions)
    return about
