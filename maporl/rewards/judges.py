"""Judges: agents of the team that score an answer. Any engine can judge."""

import math
from collections import deque
from collections.abc import Callable

from maporl.config.schema import JudgeSection
from maporl.rewards.base import RewardFailure, RewardSource, Values, where
from maporl.tasks.base import Task
from maporl.text import matches, spoken
from maporl.types import Dialogue, Message, Utterance, user_says

Speak = Callable[[str, list[list[Message]]], list[str]]
"""``(agent, conversations) -> texts``: the agent's greedy answer to each conversation, without memory between them."""


class PointwiseJudge(RewardSource):
    """Shows every answer, or everything that is said, to the judge.

    The reward is the last number of the verdict, divided by ``largest``.
    """

    def __init__(self, section: JudgeSection, speak: Speak):
        self.section, self.speak, self.agents = section, speak, (section.agent,)
        self.answers_only = section.scores == "answers"

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the judge's reward for each utterance that it is shown.

        Raises:
            RewardFailure: a verdict has no readable number, and the configuration gives no value for this case.
        """
        asked = [(d, u) for d in dialogues for u in d.utterances]
        conversations = [user_says(self.section.prompt.format(**_parts(d, u, task))) for d, u in asked]
        verdicts = self.speak(self.section.agent, conversations)
        values = iter([self._read(text, d, u) for text, (d, u) in zip(verdicts, asked, strict=True)])
        return [[next(values) for _ in d.utterances] for d in dialogues]

    def _read(self, text: str, dialogue: Dialogue, utterance: Utterance) -> float:
        score = mark(self.section.pattern, self.section.largest, text)
        if score is not None:
            return score
        if self.section.unreadable is None:
            raise RewardFailure(
                f"judge {self.section.agent!r} gave a verdict in which {self.section.pattern!r} finds no number, about "
                f"{where(dialogue, utterance)}: {text!r:.200}; change the prompt, or set reward.judge.unreadable to "
                "the reward of such answers"
            )
        return self.section.unreadable


def _parts(dialogue: Dialogue, utterance: Utterance, task: Task) -> dict[str, str]:
    """Return what a prompt may say of an utterance, by placeholder."""
    asked = dialogue.asked(utterance)
    return {
        "question": task.question(asked),
        "answer": utterance.words(),
        "reference": asked.answer,
        "agent": utterance.agent,
        "role": utterance.role or utterance.agent,
        "input": "\n\n".join(message["content"] for message in utterance.messages),
        "tools": "\n\n".join(call.result.text for call in utterance.calls if call.result is not None) or "nothing",
    }


def last_match(pattern: str, text: str) -> str | None:
    r"""The last match of ``pattern`` outside of thoughts, or its group if it has one; None if nothing matches.

    >>> last_match(r"Score: (\d)", "Score: 3, no, Score: 8"), last_match(r"\d", "3 or 8"), last_match("x", "y")
    ('8', '8', None)
    """
    last = deque(matches(pattern, spoken(text)), 1)
    return last[0][last[0].re.groups] if last else None


def mark(pattern: str, largest: float, text: str) -> float | None:
    """The last number that ``pattern`` finds, as a share of the ``largest``; None if it finds none."""
    number = last_match(pattern, text)
    try:
        value = math.nan if number is None else float(number)
    except ValueError:  # a pattern of the user's may find any text
        return None
    return None if math.isnan(value) else min(value, largest) / largest
