"""MAC-SPGG: a public goods game in which agents pay for their efforts in turn (arXiv 2508.02076). No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from maporl.rewards.rules import Credits, Rule
from maporl.rounding import exceeds
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class PublicGoods(Rule):
    """``R_i = -cost c_i^2 + synergy c_i sum_{j<i} c_j + (multiplier/n) S - penalty [S < threshold]``.

    The sum runs over the n utterances of a dialogue in order. c are their own scores, and S is the last score. The
    payoff is inspired by MAC-SPGG (arXiv 2508.02076) and reconstructed.

    Later speakers earn more for equal effort, so compare agents by position (``advantage.key`` with ``agent``).
    """

    cost: float = option(0.1, "The weight of the square of an utterance's own score, which it loses.")
    synergy: float = option(0.5, "The weight of its score times the sum of all earlier ones, which it gains.")
    multiplier: float = option(1.8, "The weight of the last score, which all utterances share.")
    penalty: float = option(0.5, "What each loses if the last score is below the threshold.")
    threshold: float = option(0.7, "The last score that is high enough.")

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [
            dict(zip(sorted(credit), self.pay([credit[i] for i in sorted(credit)]), strict=True)) for credit in credits
        ]

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
