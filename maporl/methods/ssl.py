"""SSL: zones around the right answer (arXiv 2601.22491). No torch."""

import math
from dataclasses import dataclass

from maporl.rewards.rules import Along, Credits, Rule, along_names, named_reward, split_name
from maporl.rounding import ROUNDING
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Tier(Rule):
    """``credit + alpha * zone / zones`` with ``zone = ceil(zones * proximity)`` (SSL, arXiv 2601.22491, as
    reconstructed).

    Noise within a zone does not change the credit, so it causes no advantage.
    """

    proximity: str = option(help="The name of a reward from 0 to 1.")
    zones: int = option(4, "Number of zones.")
    alpha: float = option(0.5, "What the highest zone earns.")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({split_name(self.proximity)[1]})

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return along_names(self.proximity)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [
            {
                u.id: credit[u.id] + self.bonus(named_reward(d, u, self.proximity))
                for u in d.utterances
                if u.id in credit
            }
            for d, credit in zip(dialogues, credits, strict=True)
        ]

    def bonus(self, proximity: float) -> float:
        """Return what is added to the credit at this ``proximity``.

        >>> [1 + Tier("near").bonus(math.exp(-d * d / 2)) for d in (0, 0.8, 2)]
        [1.5, 1.375, 1.125]
        """
        return self.alpha * math.ceil(self.zones * proximity * (1 - ROUNDING)) / self.zones
