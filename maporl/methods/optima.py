"""Optima: talk that is short and readable is paid more (arXiv 2410.08115). No torch."""

from dataclasses import dataclass

from maporl.rewards.rule import Credits, Rule
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class LengthShare(Rule):
    """Adds ``weight`` times a dialogue's sampled tokens, as a share of those of its question's longest dialogue."""

    weight: float = option(-0.5, "What the longest dialogue gets.")

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        tokens = [sum(len(u.response_ids) for u in d.utterances) for d in dialogues]
        most = max(1, *tokens)
        return [
            {key: value + self.weight * count / most for key, value in credit.items()}
            for credit, count in zip(credits, tokens, strict=True)
        ]


@dataclass(frozen=True)
class Readability(Rule):
    """Adds ``weight`` divided by the largest ``nll`` of a dialogue's utterances
    (:class:`maporl.rewards.likelihood.Likelihood`).

    A smaller one counts as ``least``, because words that are nearly certain would otherwise be worth more than any
    answer. A dialogue whose utterances all lack the reward keeps its credits.

    Raises:
        ValueError: ``least`` is not above 0.
    """

    weight: float = option(0.8, "What is divided by the largest `nll`.")
    least: float = option(0.1, "The smallest `nll` that counts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.least > 0:
            raise ValueError(f"least: expected a number above 0, got {self.least}")

    @property
    def reads(self) -> frozenset[str]:
        """The reward of each utterance that it reads."""
        return frozenset({"nll"})

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            nlls = [u.rewards["nll"] for u in dialogue.utterances if "nll" in u.rewards]
            added = self.weight / max(self.least, *nlls) if nlls else 0.0
            result.append({key: value + added for key, value in credit.items()})
        return result
