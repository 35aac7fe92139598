"""Agon: who is right where the rival whose draft it read was wrong earns more (arXiv 2607.07690). No torch."""

from dataclasses import dataclass

from maporl.rewards.rules import Credits, Rule
from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Convert(Rule):
    """Adds ``bonus`` to a right answer that was shown answers of which none is right (Agon, arXiv 2607.07690).

    An answer that cannot be graded counts as wrong. The rule reads labels, whatever the sources are.
    """

    bonus: float = option(1.0, "What such an answer gets.")

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        return [
            {key: value + self.bonus * _converts(d, d.utterances[key]) for key, value in credit.items()}
            for d, credit in zip(dialogues, credits, strict=True)
        ]


def _converts(dialogue: Dialogue, u: Utterance) -> bool:
    shown = [dialogue.utterances[p] for p in u.parents if dialogue.utterances[p].answers]
    return bool(shown) and _right(u) and not any(map(_right, shown))


def _right(u: Utterance) -> bool:
    return u.grade is not None and u.grade.correct is True
