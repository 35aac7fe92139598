"""ArenaRL: answers of a question are ranked by seeded single elimination (arXiv 2601.06487). No torch."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.methods.sections import ArenaSection
from maporl.rewards.base import RewardSource, Values
from maporl.rewards.build import Voices
from maporl.rewards.judges import Speak, last_match
from maporl.rewards.rules import Credits, Rule
from maporl.rounding import exceeds, mean_rank
from maporl.tasks.base import Task
from maporl.types import Dialogue, user_says


@dataclass(frozen=True)
class Tournament(Rule):
    """Every utterance of a dialogue gets ``1 - rank / (N - 1)`` (ArenaRL, arXiv 2601.06487).

    The rank is that of the dialogue's last score among the N dialogues of its question, by seeded single elimination.
    Each dialogue first meets the first one; these matches give the seeds. In later rounds the best meets the worst. A
    tie goes to the dialogue that is listed first.
    """

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        scores = [credit[max(credit)] if credit else -math.inf for credit in credits]
        ranks = eliminate(len(scores), lambda a, b: (scores[a], scores[b]))
        worth = [1.0 - rank / max(1, len(scores) - 1) for rank in ranks]
        return [dict.fromkeys(range(len(d.utterances)), w) for d, w in zip(dialogues, worth, strict=True)]


class PairwiseJudge(RewardSource):
    """Ranks the last answers of a question's dialogues by single elimination (ArenaRL, arXiv 2601.06487).

    The judge sees every pair in both orders. Every answer of a dialogue earns ``1 - rank / (N - 1)``, where N is the
    number of dialogues. The tournaments of all questions advance together, so that the judge answers one batch per
    round.
    """

    answers_only = True
    compares = True

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
            for group, group_ranks in zip(questions.values(), ranks, strict=True)
            for d, rank in zip(group, group_ranks, strict=True)
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
        """Return the points of both answers of each pair: one for each order that prefers it, half if none does."""
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
        choice = last_match(self.section.pattern, text)
        return 0.5 if choice is None else float(choice.upper() == "A")


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the source ``arena``: a dialogue's place in a tournament that an agent judges (ArenaRL).

    Raises:
        ConfigError: the section names no agent, or no team is played.
    """
    if section.arena is None or voices is None:
        raise ConfigError("reward.arena: the source 'arena' needs it; give it an agent, or use another source")
    return PairwiseJudge(section.arena, voices.speak)


def eliminate(players: int, compare: Callable[[int, int], tuple[float, float]]) -> list[int]:
    """Rank players by seeded single elimination; rank 0 is the best.

    ``compare(a, b)`` returns the points of a and of b in a match against each other.

    >>> qualities = (5, 8, 6, 3)
    >>> eliminate(4, lambda a, b: (qualities[a], qualities[b]))
    [2, 0, 1, 3]
    """
    tournament = bouts(players)
    try:
        pairs = next(tournament)
        while True:
            pairs = tournament.send([compare(a, b) for a, b in pairs])
    except StopIteration as end:
        return end.value


def bouts(players: int) -> Generator[list[tuple[int, int]], list[tuple[float, float]], list[int]]:
    """Play a tournament as a generator, so that a caller can judge all pairs of a round in one batch.

    The generator yields the pairs of each round and receives the points of both players of each pair. It returns the
    ranks; rank 0 is the best.
    """
    if players < 2:
        return [0] * players
    points: list[list[float]] = [[] for _ in range(players)]

    def record(pairs: list[tuple[int, int]], scores: list[tuple[float, float]]) -> None:
        for pair, both in zip(pairs, scores, strict=True):
            for player, score in zip(pair, both, strict=True):
                points[player].append(score)

    pairs = [(0, other) for other in range(1, players)]
    record(pairs, (yield pairs))
    seeds = sorted(range(players), key=lambda i: -mean_rank(points[i]))
    size = 1 << (players - 1).bit_length()
    bracket: list[int | None] = [seeds[s] if s < players else None for s in _bracket(size)]
    out: list[list[int]] = []
    while len(bracket) > 1:
        met = list(zip(bracket[::2], bracket[1::2], strict=True))
        pairs = [(a, b) for a, b in met if a is not None and b is not None]
        scores = yield pairs
        record(pairs, scores)
        won = {pair: pair[1] if exceeds(y, x) else pair[0] for pair, (x, y) in zip(pairs, scores, strict=True)}
        out.append([a if won[a, b] == b else b for a, b in pairs])
        bracket = [won[a, b] if a is not None and b is not None else (b if a is None else a) for a, b in met]
    champion = bracket[0]
    assert champion is not None
    order = [champion, *(i for lost in reversed(out) for i in sorted(lost, key=lambda i: -mean_rank(points[i])))]
    return [order.index(i) for i in range(players)]


def _bracket(size: int) -> list[int]:
    """Return the seeds in bracket order: the best meets the worst, and the two best can meet only in the final."""
    order = [0]
    while len(order) < size:
        order = [seed for best in order for seed in (best, 2 * len(order) - 1 - best)]
    return order
