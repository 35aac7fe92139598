"""Builders of single rows, for SFT and KTO. No torch."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from maporl.loops.builder import Builder, in_order, said, worth
from maporl.loops.replay import drawn
from maporl.loops.rows import Row
from maporl.rounding import exceeds
from maporl.sections import Finite, Natural, PositiveShare, section
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@section()
class Threshold(Builder):
    """Every utterance whose value is greater than ``above`` (MALT's data for SFT, arXiv 2412.01928)."""

    above: Finite = option(0.5, "What the value must be greater than.")
    turn: Natural | None = option(None, "Only what agents said in this turn of theirs, from 0.")
    share: PositiveShare = option(
        1.0,
        "The share of these utterances that is taken, at random (Agent-RLVR, arXiv 2506.11425, takes a fifth of the "
        "answers that were right without help).",
    )

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        rows = [row for row, _ in said(dialogues, roles, self.turn) if exceeds(row.value, self.above)]
        return [row for row in drawn(rows, self.share, "threshold") if isinstance(row, Row)]


@section()
class Signs(Builder):
    """Every utterance. It is good if its value is greater than ``above``, and otherwise bad (KTO, arXiv 2402.01306)."""

    above: Finite = option(0.5, "What the value of a good utterance is greater than.")
    makes = "signed rows"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        return [replace(row, good=exceeds(row.value, self.above)) for row, _ in said(dialogues, roles)]


@section()
class BestOf(Builder):
    """The best dialogue of every question (Optima's data for iSFT, arXiv 2410.08115).

    The worth of a dialogue is the mean of its utterances' values. The best dialogues of all questions are sorted by it.
    """

    keep: PositiveShare = option(0.7, "The share of the best dialogues after which the others are left out.")
    skip: Annotated[float, Field(ge=0, lt=1)] = option(0.0, "The share of them that is left out at the beginning.")
    at_least: Finite = option(0.0, "What a dialogue must be worth.")

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        best: dict[int, tuple[float, Dialogue]] = {}
        for dialogue in in_order(dialogues):
            value = worth(dialogue)
            if value is not None and (dialogue.prompt not in best or value > best[dialogue.prompt][0]):
                best[dialogue.prompt] = value, dialogue
        chosen = selected([value for value, _ in best.values()], self.keep, self.skip, self.at_least)
        ranked = list(best.values())
        return [row for row, _ in said([ranked[number][1] for number in chosen], roles)]


def selected(values: Sequence[float], keep: float, skip: float = 0.0, at_least: float = float("-inf")) -> list[int]:
    """Return the numbers of the selected ``values``, best first.

    The share is taken first: ranks from ``skip`` to ``keep`` of all. The threshold ``at_least`` comes after it.
    """
    order = sorted(range(len(values)), key=lambda number: -values[number])
    shares = order[round(skip * len(order)) : round(keep * len(order))]
    return [number for number in shares if values[number] >= at_least]
