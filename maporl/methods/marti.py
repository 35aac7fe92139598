"""MARTI: an answer is paid by how it compares with earlier ones, by margin or by quality. No torch."""

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from maporl.rewards.rules import Along, Credits, Rule
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Margin(Rule):
    """MARTI's margin shaping (after MAPoRL): ``R + alpha (R - Q)`` plus ``beta`` times the agent's last score.

    R is the utterance's score, and Q is the mean of all scores in earlier turns. The first turn has no earlier scores,
    so it is not shaped.
    """

    alpha: float = option(0.5, "The weight of the margin.")
    beta: float = option(
        0.0,
        "The weight of the agent's last score. With 0.5, the names are margin_with_outcome and quality_with_outcome "
        "in MARTI, and the first turn gets this term too.",
    )
    of: Literal["all", "own"] = option(
        "all",
        "Whose earlier scores count: those of all agents, as in MARTI's code, or the agent's own, as in MARTI's "
        "documents.",
    )

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return "utterance" if self.beta == 0 else "dialogue"

    def shaped(self, score: float, quality: float) -> float:
        """Return the shaped score, before the agent's last score is added."""
        return score + self.alpha * (score - quality)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            last = {u.agent: credit[u.id] for u in dialogue.utterances if u.id in credit}
            shaped = {}
            for u in (u for u in dialogue.utterances if u.id in credit):
                earlier = [
                    credit[v.id]
                    for v in dialogue.utterances
                    if v.id in credit
                    and v.turn < u.turn
                    and v.order < u.order
                    and (self.of == "all" or v.agent == u.agent)
                ]
                shaped[u.id] = self.shaped(credit[u.id], fmean(earlier)) if earlier else credit[u.id]
                shaped[u.id] += self.beta * last[u.agent]
            result.append(shaped)
        return result


@dataclass(frozen=True)
class Quality(Margin):
    """MARTI's quality shaping: ``R + alpha (Q R - (1 - Q)(1 - R))``. Everything else is as in :class:`Margin`."""

    def shaped(self, score: float, quality: float) -> float:
        """Return the shaped score, before the agent's last score is added."""
        return score + self.alpha * (quality * score - (1 - quality) * (1 - score))
