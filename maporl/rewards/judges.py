"""Judges: agents of the team that score an answer or say which of two answers is better. Any engine can judge."""

import math
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from maporl.config.schema import AnnotatorSection, ArenaSection, JudgeSection
from maporl.rewards.base import RewardFailure, RewardSource, Values, where
from maporl.rewards.tournament import bouts
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
        found = mark(self.section, text)
        if found is not None:
            return found
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


class PairwiseJudge(RewardSource):
    """Ranks the last answers of a question's dialogues by single elimination (ArenaRL, arXiv 2601.06487).

    The judge sees every pair in both orders. Every answer of a dialogue earns ``1 - rank / (N - 1)``, where N is the
    number of dialogues. The tournaments of all questions advance together, so that the judge answers one batch per
    round.
    """

    answers_only = True

    def __init__(self, section: ArenaSection, speak: Speak):
        self.section, self.speak, self.agents = section, speak, (section.agent,)

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the reward of each answer, which is that of its dialogue."""
        questions: dict[int, list[Dialogue]] = {}
        for dialogue in sorted(dialogues, key=lambda d: d.rollout):  # all meet the first one
            questions.setdefault(dialogue.prompt, []).append(dialogue)
        ranks = self._tournaments(list(questions.values()), task)
        worth = {
            id(d): 1.0 - rank / max(1, len(group) - 1)
            for group, own in zip(questions.values(), ranks, strict=True)
            for d, rank in zip(group, own, strict=True)
        }
        return [[worth[id(d)]] * len(d.utterances) for d in dialogues]

    def _tournaments(self, groups: list[list[Dialogue]], task: Task) -> list[list[int]]:
        running: list[tuple[int, Generator[Any, Any, Any], Any]] = []
        ranks: list[list[int]] = [[] for _ in groups]
        for number, group in enumerate(groups):
            tournament = bouts(len(group))
            self._next(running, ranks, number, tournament, None)
        while running:
            pairs = [(groups[number][a], groups[number][b]) for number, _, round_ in running for a, b in round_]
            scores = iter(self._judge(pairs, task))
            waiting = list(running)
            running.clear()
            for number, tournament, round_ in waiting:
                self._next(running, ranks, number, tournament, [next(scores) for _ in round_])
        return ranks

    def _next(
        self, running: list, ranks: list[list[int]], number: int, tournament: Generator[Any, Any, Any], scores: Any
    ) -> None:
        try:
            running.append((number, tournament, next(tournament) if scores is None else tournament.send(scores)))
        except StopIteration as end:
            ranks[number] = end.value

    def _judge(self, pairs: list[tuple[Dialogue, Dialogue]], task: Task) -> list[tuple[float, float]]:
        """Return (points of the first, points of the second) for each pair.

        An answer gets one point for each order in which it is preferred. Both get half a point if a verdict prefers
        none.
        """
        both = [order for a, b in pairs for order in ((a, b), (b, a))]
        conversations = [
            user_says(
                self.section.prompt.format(
                    question=task.question(a.example), first=a.utterances[-1].words(), second=b.utterances[-1].words()
                )
            )
            for a, b in both
        ]
        first = [self._prefers_first(text) for text in self.speak(self.section.agent, conversations)]
        return [(there + 1.0 - back, 1.0 - there + back) for there, back in zip(first[::2], first[1::2], strict=True)]

    def _prefers_first(self, text: str) -> float:
        found = last_match(self.section.pattern, text)
        return 0.5 if found is None else float(found.upper() == "A")


def last_match(pattern: str, text: str) -> str | None:
    r"""The last match of ``pattern`` outside of thoughts, or its group if it has one; None if nothing matches.

    >>> last_match(r"Score: (\d)", "Score: 3, no, Score: 8"), last_match(r"\d", "3 or 8"), last_match("x", "y")
    ('8', '8', None)
    """
    last = deque(matches(pattern, spoken(text)), 1)
    return last[0][last[0].re.groups] if last else None


def mark(section: JudgeSection | AnnotatorSection, text: str) -> float | None:
    """The last number that the section's pattern finds, as a share of its largest; None if it finds none."""
    found = last_match(section.pattern, text)
    try:
        value = math.nan if found is None else float(found)
    except ValueError:  # a pattern of the user's may find any text
        return None
    return None if math.isnan(value) else min(value, section.largest) / section.largest
