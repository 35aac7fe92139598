"""Measures a team's dialogues: accuracy per turn and agent, votes, agreement, changes of mind. No torch.

A question that ended early keeps its last answers in all later turns, so that every turn is about all questions.

Every share comes with a 95% Wilson interval over *questions*. Agents that answer the same question are not independent
samples of it, so their results are averaged per question first. A tied vote counts 1/(number of tied answers) if the
right answer is among them; this is its expectation under a fair draw. An answer that cannot be read never wins against
one that can.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from maporl.types import Dialogue, Grade

Z95 = 1.959963984540054
SCORE = "reward/score"
"""The mean score of an utterance among the rewards of an evaluation."""


@dataclass(frozen=True)
class Share:
    """A share: ``count`` of ``total``. The count may be fractional, because votes can tie."""

    count: float
    total: int

    @property
    def value(self) -> float:
        """The share as a number between 0 and 1; NaN if the total is 0."""
        return self.count / self.total if self.total else math.nan

    def interval(self) -> tuple[float, float]:
        """Return the 95% Wilson score interval.

        >>> [round(x, 4) for x in Share(8, 10).interval()]
        [0.4902, 0.9433]
        """
        if not self.total:
            return (math.nan, math.nan)
        n, p = self.total, self.value
        centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
        return (max(0.0, centre - half), min(1.0, centre + half))


def numbers_of(share: Share) -> dict[str, float]:
    """Return a share and the ends of its interval by name: ``value``, ``low`` and ``high``."""
    low, high = share.interval()
    return {"value": share.value, "low": low, "high": high}


@dataclass(frozen=True)
class Difference:
    """The mean over questions of paired differences between two shares.

    ``low`` and ``high`` are its 95% interval. The interval is normal, from the standard deviation of the differences.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], most: float = 1.0) -> "Difference":
        """Return the difference of ``pairs``, which are (before, after) on each question. ``most`` is the largest that
        there can be.

        >>> Difference.of([(0, 1), (0, 1), (0, 0), (1, 0)]).points()
        '+25.0 points (95% interval -68.8 to +100.0, compared question by question)'
        """
        changes = [after - before for before, after in pairs]
        mean = sum(changes) / len(changes)
        deviation = math.sqrt(sum((d - mean) ** 2 for d in changes) / max(1, len(changes) - 1))
        half = Z95 * deviation / math.sqrt(len(changes))
        return cls(mean, max(-most, mean - half), min(most, mean + half))

    @property
    def sign(self) -> int:
        """1 if the whole interval is above 0, -1 if it is below 0, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def brief(self) -> str:
        """Return it in percentage points, for a table."""
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    def points(self) -> str:
        """Return it in percentage points, for a sentence."""
        interval = f"95% interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        return f"{100 * self.mean:+.1f} points ({interval}, compared question by question)"


def proves_nothing(arms: Iterable[Iterable[float]], seeds: int) -> str:
    """Return in a sentence why a comparison of ``arms`` proves nothing. Empty if it may prove something.

    Args:
        arms: for each arm, how often its answers are right, by run or by question.
        seeds: how many trainings each arm has. Two or fewer do not tell a difference from chance.

    >>> proves_nothing([[0, 0], [0, 0]], 5)
    'No answer was ever right, so this comparison proves nothing.'
    >>> proves_nothing([[0, 1], [1, 1]], 5)
    ''
    """
    found = {value for arm in arms for value in arm}
    if len(found) == 1:
        told = "All results are equal" if any(found) else "No answer was ever right"
        return f"{told}, so this comparison proves nothing."
    if seeds > 2:
        return ""
    return (
        f"With {seeds} seed{'s' * (seeds > 1)} of each, chance in training may explain any difference, so this "
        "comparison proves nothing about how they were trained."
    )


@dataclass(frozen=True)
class TurnReport:
    """One turn: accuracy of each agent, of all agents together and of the majority vote; how often all agree."""

    agents: dict[str, Share]
    team: Share
    majority: Share
    agreement: Share


@dataclass(frozen=True)
class Flips:
    """Changes between one turn and the next: counts over the agents and ``questions`` that have both turns."""

    wrong_to_right: int
    right_to_wrong: int
    stayed_right: int
    stayed_wrong: int
    questions: int

    def shares(self) -> dict[str, Share]:
        """Return improved, declined and same, as shares of all answers that were given in both turns."""
        same = self.stayed_right + self.stayed_wrong
        answers = max(1, self.wrong_to_right + self.right_to_wrong + same)
        counts = {"improved": self.wrong_to_right, "declined": self.right_to_wrong, "same": same}
        return {name: Share(count * self.questions / answers, self.questions) for name, count in counts.items()}


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    ``baselines`` are accuracies without debate at the same number of sampled tokens. ``finished`` has, for each turn,
    the share of questions that ended in it by consensus. ``rewards`` are mean rewards, such as ``reward/length``.
    ``reward/score`` is the mean score of an utterance: the weighted sum that training pays, without the sources in
    ``unmeasured``, which says why each of them was left out.
    """

    turns: list[TurnReport]
    flips: list[Flips]
    questions: int
    tokens: int
    baselines: dict[str, Share] = field(default_factory=dict)
    finished: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)

    @property
    def unlabelled(self) -> bool:
        """Whether rewards were asked for and no answer is right or wrong."""
        return bool(self.rewards or self.unmeasured) and not any(turn.team.total for turn in self.turns)

    def final(self) -> Share:
        """Return the accuracy of all agents together in the last turn."""
        return self.turns[-1].team

    def metrics(self) -> dict[str, float]:
        """Return the numbers as a flat dict for logs.

        A share of nothing, where no answer can be graded, is left out.
        """
        flat: dict[str, float] = {}
        for number, turn in enumerate(self.turns, 1):
            flat[f"accuracy/turn_{number}"] = turn.team.value
            flat[f"majority/turn_{number}"] = turn.majority.value
            if len(turn.agents) > 1:  # one agent agrees with itself
                flat[f"agreement/turn_{number}"] = turn.agreement.value
            flat |= {f"accuracy/turn_{number}/{agent}": share.value for agent, share in turn.agents.items()}
        for number, flips in enumerate(self.flips, 1):
            if not flips.questions:
                continue
            flat[f"flips/{number}_to_{number + 1}/wrong_to_right"] = float(flips.wrong_to_right)
            flat[f"flips/{number}_to_{number + 1}/right_to_wrong"] = float(flips.right_to_wrong)
            flat |= {
                f"change/{number}_to_{number + 1}/{name}": s.value for name, s in flips.shares().items() if s.total
            }
        if any(self.finished):
            flat |= {f"finished/turn_{number}": share for number, share in enumerate(self.finished, 1)}
        return {name: number for name, number in flat.items() if not math.isnan(number)} | self.rewards

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, including the intervals."""

        def plain(value: Any) -> Any:
            if isinstance(value, Share):
                numbers = numbers_of(value) if value.total else {}  # JSON has no NaN
                return {"count": value.count, "total": value.total, "value": None, "low": None, "high": None, **numbers}
            if isinstance(value, dict):
                return {k: plain(v) for k, v in value.items()}
            return value

        return {
            "questions": self.questions,
            "tokens": self.tokens,
            "turns": [
                {k: plain(getattr(t, k)) for k in ("agents", "team", "majority", "agreement")} for t in self.turns
            ],
            "flips": [{**asdict(f), "shares": plain(f.shares())} for f in self.flips],
            "baselines": plain(self.baselines),
            "finished": self.finished,
            "rewards": self.rewards,
            "unmeasured": self.unmeasured,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Evaluation":
        """Inverse of :meth:`to_json`; what older versions did not count is 0 or empty.

        Raises:
            KeyError: the record lacks one of its parts.
            TypeError, AttributeError: a part is of the wrong kind, or has entries that this version does not know.
            ValueError: a share counts more than its total, or a change counts something that is not a whole number.
        """

        def share(entry: dict[str, Any]) -> Share:
            if not 0 <= entry["count"] <= entry["total"] < 2**53:
                raise ValueError(f"{entry['count']!s:.40} of {entry['total']!s:.40} cannot be a share")
            return Share(entry["count"], entry["total"])

        def change(entry: dict[str, Any]) -> Flips:
            counts = {"questions": 0, **{name: count for name, count in entry.items() if name != "shares"}}
            if not all(isinstance(count, int) for count in counts.values()):
                raise ValueError(f"expected whole numbers, got {counts!r:.80}")
            return Flips(**counts)

        turns = [
            TurnReport(
                agents={agent: share(entry) for agent, entry in turn["agents"].items()},
                **{key: share(turn[key]) for key in ("team", "majority", "agreement")},
            )
            for turn in record["turns"]
        ]
        flips = [change(entry) for entry in record["flips"]]
        baselines = {name: share(entry) for name, entry in record.get("baselines", {}).items()}
        counts, finished = (record.get("questions", 0), record.get("tokens", 0)), record.get("finished", [])
        if not all(isinstance(count, int) for count in counts):
            raise ValueError(f"expected whole numbers of questions and tokens, got {counts!r:.80}")
        if not all(0 <= share <= 1 for share in finished):
            raise ValueError(f"expected shares of finished dialogues, got {finished!r:.80}")
        rewards = record.get("rewards", {})
        if not all(math.isfinite(mean) for mean in rewards.values()):
            raise ValueError(f"expected finite rewards, got {rewards!r:.80}")
        return cls(turns, flips, *counts, baselines, finished, rewards, dict(record.get("unmeasured", {})))


def turns_played(dialogues: Sequence[Dialogue]) -> int:
    """Return the number of turns of the longest dialogue; 0 without dialogues. A missing answer counts as a turn."""
    return max((d.turns() or int(unanswered(d)) for d in dialogues), default=0)


def evaluate_dialogues(dialogues: Sequence[Dialogue], turns: int | None = None) -> Evaluation:
    """Measure graded dialogues. Shares leave out answers that cannot be graded (``correct`` is None). A dialogue in
    which nobody answers a question that has an answer is wrong.

    ``turns`` is the number of turns to report. By default it is that of the longest dialogue. Give it if other
    processes may have longer dialogues of the same evaluation.
    """
    count = turns_played(dialogues) if turns is None else turns
    reports = [_turn_report(dialogues, turn) for turn in range(count)]
    flips = [_flips(dialogues, turn) for turn in range(count - 1)]
    tokens = sum([len(u.response_ids) for d in dialogues for u in d.utterances])
    ended = [d.turns() for d in dialogues if d.outcome == "consensus"]
    finished = [ended.count(turn + 1) / max(1, len(dialogues)) for turn in range(count)]
    return Evaluation(reports, flips, len(dialogues), tokens, finished=finished)


def merge(parts: Sequence[Evaluation]) -> Evaluation:
    """Combine evaluations of different questions into one. All parts must report the same number of turns."""
    if len(parts) == 1:
        return parts[0]
    questions = sum(part.questions for part in parts)
    turns = []
    for reports in zip(*(part.turns for part in parts), strict=True):
        names = dict.fromkeys(name for report in reports for name in report.agents)
        agents = {name: _added([r.agents[name] for r in reports if name in r.agents]) for name in names}
        shares = {key: _added([getattr(r, key) for r in reports]) for key in ("team", "majority", "agreement")}
        turns.append(TurnReport(agents, **shares))
    flips = [
        Flips(**{f.name: sum(getattr(part_flips, f.name) for part_flips in each) for f in fields(Flips)})
        for each in zip(*(part.flips for part in parts), strict=True)
    ]
    finished = [
        sum(share * part.questions for share, part in zip(each, parts, strict=True)) / questions
        for each in zip(*(part.finished for part in parts), strict=True)
    ]
    return Evaluation(turns, flips, questions, sum(part.tokens for part in parts), finished=finished)


def _added(shares: Sequence[Share]) -> Share:
    return Share(sum(s.count for s in shares), sum(s.total for s in shares))


def majority_credit(grades: Sequence[Grade]) -> float:
    """Return the expected correctness of the majority answer, with ties broken by a fair draw.

    >>> right, wrong, none = Grade("4", True, ""), Grade("5", False, ""), Grade(None, False, "")
    >>> majority_credit([right, wrong]), majority_credit([right, none, none]), majority_credit([wrong, wrong, right])
    (0.5, 1.0, 0.0)
    """
    votes = Counter([g.answer for g in grades if g.answer is not None])
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == most]
    right = {g.answer for g in grades if g.correct}
    return len(right.intersection(tied)) / len(tied)


def unanswered(dialogue: Dialogue) -> bool:
    """Return whether a dialogue ended although nobody has answered its question, which has an answer."""
    return not dialogue.answers() and not dialogue.lost and bool(dialogue.example.answer)


def _turn_report(dialogues: Sequence[Dialogue], turn: int) -> TurnReport:
    by_agent: dict[str, list[bool]] = {}
    votes, agreed, voted, right = 0.0, 0, 0, 0.0
    for dialogue in dialogues:
        standing = dialogue.at(min(turn, dialogue.turns() - 1))
        grades = []
        for utterance in standing:
            if utterance.grade is not None and utterance.grade.correct is not None:
                grades.append(utterance.grade)
                by_agent.setdefault(utterance.agent, []).append(utterance.grade.correct)
        if grades:
            votes += majority_credit(grades)
            agreed += grades[0].answer is not None and len({g.answer for g in grades}) == 1
            voted += 1
            right += sum([bool(g.correct) for g in grades]) / len(grades)
        voted += not standing and unanswered(dialogue)
    return TurnReport(
        agents={agent: Share(sum(correct), len(correct)) for agent, correct in by_agent.items()},
        team=Share(right, voted),
        majority=Share(votes, voted),
        agreement=Share(agreed, voted),
    )


def _flips(dialogues: Sequence[Dialogue], turn: int) -> Flips:
    counts: Counter[tuple[bool, bool]] = Counter()
    questions = 0
    for dialogue in dialogues:
        before = {u.agent: u.grade.correct for u in dialogue.at(turn) if u.grade}
        after = {u.agent: u.grade.correct for u in dialogue.at(turn + 1) if u.grade}
        both = [a for a in before.keys() & after.keys() if before[a] is not None and after[a] is not None]
        for agent in both:
            counts[bool(before[agent]), bool(after[agent])] += 1
        questions += bool(both)
    return Flips(counts[False, True], counts[True, False], counts[True, True], counts[False, False], questions)
