"""CCPO: a thinker is paid where it turns the outcome (arXiv 2603.21563). No torch."""

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from maporl.rewards.counterfactual import worth, worths_without
from maporl.rewards.rules import Credits, Rule
from maporl.rounding import exceeds
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Counterfactual(Rule):
    """An agent that was left out gets ``weight`` more where it turned the outcome, and less where it spoilt it (CCPO,
    arXiv 2603.21563).

    The outcome of a dialogue is its last score R, and s is what it is without the agent. The agent turned the outcome
    if R is above ``threshold`` and s below it, and spoilt it the other way round.

    With ``baseline: question`` s is the same for all dialogues of a question. After a group mean the bonus makes the
    agent's advantages larger by one factor, ``1 + weight / (right - wrong)`` of the two scores, or does nothing where s
    is at the threshold. After a division by the standard deviation nothing is left of it.
    """

    weight: float = option(0.2, "What turning or spoiling the outcome is worth.")
    threshold: float = option(0.5, "The score that separates good outcomes from bad ones.")
    baseline: Literal["question", "paired"] = option(
        "question",
        "What it is without the agent: the mean over all dialogues of the question, or that of the dialogue itself "
        "(paired).",
    )

    along = "question"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"marginal"})

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        alone = [{min(out): v for out, v in worths_without(d).items() if len(out) == 1} for d in dialogues]
        result = []
        for dialogue, credit, without in zip(dialogues, credits, alone, strict=True):
            changed = dict(credit)
            outcome = worth(dialogue)
            for agent, paired in without.items():
                base = paired if self.baseline == "paired" else fmean(values[agent] for values in alone)
                bonus = self.weight * self.turned(outcome, base)
                for u in (u for u in dialogue.utterances if u.agent == agent):
                    changed[u.id] = credit.get(u.id, 0.0) + bonus
            result.append(changed)
        return result

    def turned(self, outcome: float, without: float) -> int:
        """Return 1 if an agent turned the outcome, -1 if it spoilt it, and 0 otherwise.

        >>> rule = Counterfactual(threshold=0)
        >>> [rule.turned(outcome, without) for outcome, without in ((1, -0.5), (-1, 0.5), (1, 0.5), (1, 0))]
        [1, -1, 0, 0]
        """
        t = self.threshold
        turned = exceeds(outcome, t) and exceeds(t, without)
        spoilt = exceeds(t, outcome) and exceeds(without, t)
        return int(turned) - int(spoilt)
