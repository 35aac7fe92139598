"""MADA-RL: critics of a debate are paid for being right where the generators are wrong (arXiv 2607.18006). No torch."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from maporl.rewards.rules import Credits, Rule
from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class BeyondShown(Rule):
    """Subtracts ``weight`` times the share of the answers shown to it that are right (MADA-RL, arXiv 2607.18006).

    What was shown no answer keeps its credit. An answer that cannot be graded counts as wrong.
    """

    weight: float = option(2.0, "The weight of the share; that of a right answer.")

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        def share(d: Dialogue, u: Utterance) -> float:
            shown = [d.utterances[p] for p in u.parents if d.utterances[p].answers]
            return fmean(_right(v) for v in shown) if shown else 0.0

        return [
            {key: value - self.weight * share(d, d.utterances[key]) for key, value in credit.items()}
            for d, credit in zip(dialogues, credits, strict=True)
        ]


@dataclass(frozen=True)
class ShortAndRight(Rule):
    """Adds ``weight`` times ``0.5 - (length - least) / (most - least)``, and to wrong answers at most 0 (MADA-RL).

    Lengths are tokens. The least and the most are over the answers of the same agent in the same turn to the question;
    where they are equal, nothing is added.
    """

    weight: float = option(1.0, "What is between the shortest and the longest right answer.")

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        pairs = [(d.utterances[key], credit) for d, credit in zip(dialogues, credits, strict=True) for key in credit]
        lengths: dict[tuple[str, int], list[int]] = defaultdict(list)
        for u, _ in pairs:
            lengths[u.agent, u.turn].append(len(u.response_ids))

        def added(u: Utterance) -> float:
            least, most = min(lengths[u.agent, u.turn]), max(lengths[u.agent, u.turn])
            share = 0.5 - (len(u.response_ids) - least) / (most - least) if most > least else 0.0
            return self.weight * (share if _right(u) else min(0.0, share))

        return [
            {key: value + added(d.utterances[key]) for key, value in credit.items()}
            for d, credit in zip(dialogues, credits, strict=True)
        ]


def _right(u: Utterance) -> bool:
    return u.grade is not None and u.grade.correct is True
