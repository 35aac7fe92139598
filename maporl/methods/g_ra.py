"""G-RA: rewards in order of priority, of which each is a gate for the next (arXiv 2508.10548). No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from maporl.rewards.labels import IMPLIED
from maporl.rewards.rules import Along, Credits, Rule, along_names, named_reward, split_name
from maporl.rounding import exceeds
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Gate(Rule):
    """The sum of the named rewards in ``order`` of priority (G-RA, arXiv 2508.10548).

    A reward counts only if every reward before it is above ``threshold``. Each must therefore vary while those before
    it are above it. If a reward of higher priority implies it, the gate only counts that one twice.

    Raises:
        ValueError: the order is empty, or names a reward after one that implies it.
    """

    order: tuple[str, ...] = option(help="The rewards, those of highest priority first.")
    threshold: float = option(0.0, "What a reward must be above, so that those after it count.")

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
        return frozenset(split_name(name)[1] for name in self.order)

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return along_names(*self.order)

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [
            {
                u.id: self.gated([named_reward(d, u, name) for name in self.order])
                for u in d.utterances
                if u.id in credit
            }
            for d, credit in zip(dialogues, credits, strict=True)
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
