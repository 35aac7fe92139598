"""ONI: a reward that is learned beside the team, from an agent's notes on what others observe (arXiv 2410.23022).

No torch.
"""

import json
from pathlib import Path
from statistics import fmean

from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.methods.sections import AnnotatorSection
from maporl.rewards.base import RewardSource, Values
from maporl.rewards.build import Voices
from maporl.rewards.judges import Speak, last_match, mark
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance
from trl_ext.process import distributed

NOTES = "notes.json"


class Annotator(RewardSource):
    """Pays an utterance by the note on what came of it (ONI, arXiv 2410.23022, with its look-up of labels).

    Between updates an agent of the team, which does not play, labels what was observed. Later utterances to which the
    same is observed earn this label, and others 0. So rewards cost no model call while a team plays, and the first
    update has none.
    """

    learns = True

    def __init__(self, section: AnnotatorSection, speak: Speak):
        self.section, self.speak, self.agents = section, speak, (section.agent,)
        self.notes: dict[str, float | None] = {}
        """The label of each conversation in which the annotator was asked; None if no number was found."""

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the label of what each utterance led to: 0 if it is not known yet, None if nothing was observed."""
        asked = [[self._asked(d, u, task) for u in d.utterances] for d in dialogues]
        return [[None if key is None else self.notes.get(key) or 0.0 for key in keys] for keys in asked]

    def after_update(self, update: int, dialogues: list[Dialogue], task: Task) -> dict[str, float]:
        """Let the annotator label what was observed last, and return how many notes there are and how many were found.

        Each process asks about its share of what all have observed, and all keep the same notes.
        """
        asked = [self._asked(d, u, task) for d in reversed(dialogues) for u in reversed(d.utterances)]
        seen = distributed.all_gather_lists([key for key in asked if key is not None])
        metrics: dict[str, float] = {}
        if seen:
            metrics["annotations/known"] = fmean(self.notes.get(key) is not None for key in seen)
        if update % self.section.every == 0:
            new = [key for key in dict.fromkeys(seen) if key not in self.notes][: self.section.per_update]
            mine = new[distributed.rank() :: distributed.size()]
            texts = self.speak(self.section.agent, [[{"role": "user", "content": key}] for key in mine]) if new else []
            marks = {
                key: mark(self.section.pattern, self.section.largest, text)
                for key, text in zip(mine, texts, strict=True)
            }
            for labels in distributed.all_gather(marks):
                self.notes |= labels
        labels = [label for label in self.notes.values() if label is not None]
        metrics["annotations/notes"] = float(len(self.notes))
        if self.notes:
            metrics["annotations/unreadable"] = 1 - len(labels) / len(self.notes)
        return metrics | ({"annotations/label": fmean(labels)} if labels else {})

    def save(self, folder: Path) -> None:
        """Write the notes, as JSON."""
        (folder / NOTES).write_text(json.dumps(self.notes, ensure_ascii=False, indent=1), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`."""
        self.notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))

    def _asked(self, dialogue: Dialogue, utterance: Utterance, task: Task) -> str | None:
        """Return what the annotator is asked about what an utterance led to."""
        observation = observed(dialogue, utterance)
        if observation is not None and self.section.read is not None:
            observation = last_match(self.section.read, observation)
        if observation is None:
            return None
        question = task.question(dialogue.asked(utterance))
        return self.section.prompt.format(question=question, observation=observation)


def observed(dialogue: Dialogue, utterance: Utterance) -> str | None:
    """Return what an utterance led to: what its calls returned, or what the next speaker is shown, if there is one.

    Of those who speak at the same time next, the same agent is taken if it is among them.
    """
    results = [call.result.text for call in utterance.calls if call.result is not None]
    if results:
        return "\n\n".join(results)
    later = [u for u in dialogue.utterances if u.order > utterance.order]
    if not later:
        return None
    order = min(u.order for u in later)
    speakers = [u for u in later if u.order == order]
    following = next((u for u in speakers if u.agent == utterance.agent), speakers[0])
    return "\n\n".join(message["content"] for message in following.messages if message["role"] == "user")


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the source ``annotator``: an agent's label of what an utterance led to (ONI).

    Raises:
        ConfigError: the section names no agent, or no team is played.
    """
    if section.annotator is None or voices is None:
        raise ConfigError("reward.annotator: the source 'annotator' needs it; give it an agent, or use another source")
    return Annotator(section.annotator, voices.speak)
