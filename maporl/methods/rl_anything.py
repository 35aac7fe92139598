"""RLAnything: steps are paid by outcome and verdicts, and verdicts by agreeing with both (arXiv 2602.02488).

No torch.
"""

import math
from dataclasses import dataclass
from statistics import fmean

from maporl.rewards.labels import is_step_verdict
from maporl.rewards.rules import Credits, Rule
from maporl.rounding import exceeds
from maporl.types import Dialogue
from trl_ext.ppo.options import NotNegative, option


@dataclass(frozen=True)
class Consistency(Rule):
    """A judged utterance earns its credit so far, O, plus the mean of its verdicts, 1 or -1 each. A verdict S earns
    that times S.

    The verdicts are those of ``protocol.step_judge``. So a verdict is paid for agreeing with the outcome and with the
    others. One that cannot be read counts 0 in the mean. With ``rules: [last, consistency]``, O is the outcome of the
    dialogue.

    The team and the judge earn 0 where a question does not teach them, which teaches nothing if rows of a question are
    compared with each other. A question with one dialogue always teaches both, because its share says nothing.

    With outcomes of 1 and -1, a good verdict never costs anything after a success, nor a bad one after a failure. With
    outcomes of 1 and 0, the majority of the verdicts decides where dialogues fail: if most call a step good, a good one
    earns more there too, and a judge that begins so learns to call everything good.

    Raises:
        ValueError: two shares do not rise from 0 to 1, ``weight`` is below 0, ``failure`` is not below 1, or a number
            is not finite.
    """

    weight: NotNegative = option(1.0, "What the mean of the verdicts is multiplied by.")
    unreadable: float = option(-2.0, "What a verdict earns that cannot be read.")
    least: float = option(
        0.125,
        "A question teaches the team if at least this share of its dialogues has a last judged utterance with a "
        "credit above 0.",
    )
    most: float = option(0.875, "And if at most this share has.")
    judge_least: float = option(0.2, "The same share at which it teaches the judge, at least.")
    judge_most: float = option(0.8, "And at most.")
    failure: float | None = option(
        None,
        "A number below 1, -1 as published, in place of each credit that is not above 0; a credit above 0 is then 1. "
        "None: credits stay.",
    )

    needs = frozenset({"caller"})
    needs_verdicts = True
    along = "question"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.unreadable):
            raise ValueError(f"unreadable: expected a finite number, got {self.unreadable}")
        if self.failure is not None and not -math.inf < self.failure < 1:
            raise ValueError(
                "failure: expected a finite number below 1, which is what a success is worth, or null for the credit "
                f"itself, got {self.failure}"
            )
        for low, high in (("least", "most"), ("judge_least", "judge_most")):
            if not 0 <= getattr(self, low) <= getattr(self, high) <= 1:
                raise ValueError(
                    f"{low}, {high}: expected shares that rise from 0 to 1, got {getattr(self, low)}, "
                    f"{getattr(self, high)}"
                )

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        outcomes = [_last(d, credit) for d, credit in zip(dialogues, credits, strict=True)]
        successes = [exceeds(value, 0.0) for value in outcomes if value is not None]
        share = sum(successes) / len(successes) if successes else math.nan
        alone = len(dialogues) == 1
        team, judge = alone or self.least <= share <= self.most, alone or self.judge_least <= share <= self.judge_most
        return [self._paid(d, credit, team, judge) for d, credit in zip(dialogues, credits, strict=True)]

    def _paid(self, dialogue: Dialogue, credit: dict[int, float], team: bool, judge: bool) -> dict[int, float]:
        paid: dict[int, float] = {}
        for u in (u for u in dialogue.utterances if not is_step_verdict(u) and u.id in credit):
            verdicts = [v for v in dialogue.utterances if is_step_verdict(v) and v.caller == u.id]
            said = [v.tags["verdict"] or 0 for v in verdicts]
            worth = self._outcome(credit[u.id]) + (self.weight * fmean(said) if said else 0.0)
            paid[u.id] = worth if team else 0.0
            for v in verdicts:
                sign = v.tags["verdict"]
                paid[v.id] = 0.0 if not judge else self.unreadable if sign is None else worth * sign
        return paid

    def _outcome(self, credit: float) -> float:
        return credit if self.failure is None else 1.0 if exceeds(credit, 0.0) else self.failure


def _last(dialogue: Dialogue, credit: dict[int, float]) -> float | None:
    """Return the credit of the last utterance that is judged."""
    judged = [u.id for u in dialogue.utterances if not is_step_verdict(u) and u.id in credit]
    return credit[judged[-1]] if judged else None
