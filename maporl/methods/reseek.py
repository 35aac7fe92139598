"""ReSeek: an agent is paid for its judgements of the results that it called for (arXiv 2510.00568). No torch."""

import re
from collections import Counter
from statistics import fmean

from maporl.config.schema import RewardSection
from maporl.methods.sections import JudgementSection
from maporl.rewards.base import RewardSource, Values
from maporl.rewards.build import Voices
from maporl.rewards.labels import is_judgement
from maporl.rewards.scoring import shares_right
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance
from trl_ext.process import distributed

_WORD = re.compile(r"\w+")


class Judgement(RewardSource):
    """The reward ``judgement``: whether an agent rightly calls a result useful, in the protocol ``call_return`` with
    ``judge``.

    A result is useful if it has more than the share ``similar`` of the words of the right answer. A judgement that
    cannot be read counts as the wrong one. The judgement is tagged with what it should have been (``ideal``).
    """

    def __init__(self, section: JudgementSection):
        self.section = section

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return what every judgement of a result earns, if the right answer is known."""
        return [[self._earned(d, u) for u in d.utterances] for d in dialogues]

    def after_update(self, update: int, dialogues: list[Dialogue], task: Task) -> dict[str, float]:
        """Return how the judgements of an update were, over all processes, or nothing without any.

        Where few results are useful, an agent that always says no is mostly right. So the accuracy is the mean of the
        share of useful results that were called useful, and of the share of the others that were called useless.
        """
        judgements = [
            (u.tags["ideal"], u.tags["useful"])
            for d in dialogues
            for u in d.utterances
            if is_judgement(u) and "ideal" in u.tags
        ]
        made = distributed.all_gather_lists(judgements)
        if not made:
            return {}
        return {
            "judgements/balanced_accuracy": fmean(shares_right(made)),
            "judgements/useful": fmean(said is True for _, said in made),
        }

    def _earned(self, dialogue: Dialogue, utterance: Utterance) -> float | None:
        truth = dialogue.asked(utterance).answer
        if not is_judgement(utterance) or truth is None:
            return None
        section, ideal = self.section, similarity(judged_text(dialogue, utterance), truth) > self.section.similar
        utterance.tags["ideal"] = ideal
        if utterance.tags["useful"] is ideal:
            return section.right
        return section.wrong_no if ideal else section.wrong_yes


def judged_text(dialogue: Dialogue, utterance: Utterance) -> str:
    """Return the result that a judgement is about: what was said to its agent, or what its agent's call returned."""
    parent = next(u for u in dialogue.utterances if u.id == utterance.parents[0])
    results = [call.result.text for call in parent.calls if call.result is not None]
    return results[-1] if results and parent.agent == utterance.agent else parent.text


def similarity(text: str, truth: str) -> float:
    """Return the share of the words of ``truth`` that ``text`` has, in [0, 1]. The size of letters does not matter.

    >>> similarity("It was Jane Austen, in 1815.", "jane austen"), similarity("Austen", "Jane Austen"), similarity("x", "")
    (1.0, 0.5, 0.0)
    """  # noqa: E501
    said, right = Counter(_WORD.findall(text.lower())), Counter(_WORD.findall(truth.lower()))
    return sum((said & right).values()) / sum(right.values()) if right else 0.0


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the source ``judgement``: whether an agent rightly judges a result that it called for (ReSeek)."""
    return Judgement(section.judgement or JudgementSection())
