"""MARS²: credit in a tree of attempts, beside what an attempt followed and beside its siblings (arXiv 2604.14564).

No torch.
"""

import math
from dataclasses import dataclass
from statistics import fmean

from maporl.rewards.rules import Credits, Rule, identity
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class TreeMargin(Rule):
    """``r + alpha (r - b)`` for an utterance of a tree, with ``b = (1 - siblings) p + siblings s`` (MARS², arXiv
    2604.14564).

    p is the shaped credit of what the utterance followed, and s is the mean score of the others that followed the same.
    What followed the question has no p, and an only child has no s; then b is the other of the two, and without both
    the score stays.

    Raises:
        ValueError: ``siblings`` is not from 0 to 1.
    """

    alpha: float = option(0.5, "The weight of the margin.")
    siblings: float = option(
        0.5, "The share of what the others scored in what an utterance is compared with, from 0 to 1."
    )

    along = "utterance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.siblings <= 1:
            raise ValueError(f"tree_margin: siblings: expected a share from 0 to 1, got {self.siblings}")

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        scores: dict[tuple, float] = {}
        followed: dict[tuple, tuple | None] = {}
        for dialogue, credit in zip(dialogues, credits, strict=True):
            for u in (u for u in dialogue.utterances if u.id in credit):
                name = identity(dialogue, u)
                before = [v for v in dialogue.utterances if v.id in credit and v.order < u.order]
                scores[name], followed[name] = credit[u.id], identity(dialogue, before[-1]) if before else None
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
            {u.id: shaped[identity(d, u)] for u in d.utterances if u.id in credit}
            for d, credit in zip(dialogues, credits, strict=True)
        ]
