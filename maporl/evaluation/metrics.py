"""What a team's dialogues are worth: accuracy per turn and agent, votes, agreement, changes of mind. No torch.

A question that was finished early keeps its last answers in all later turns, so that every turn is about all questions.

Every share comes with a 95% Wilson interval over *questions*: agents who answer the same question are no independent
samples of it, so what they share is averaged per question first. A vote that ties is worth 1/(number of tied answers) if the
truth is among them, its expectation under a fair draw; an answer that cannot be read never wins against one that can.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from maporl.types import Dialogue, Grade

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Share:
    """``count`` of ``total`` (the count may be fractional where votes tie)."""

    count: float
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else math.nan

    def interval(self) -> tuple[float, float]:
        """95% Wilson score interval.

        >>> [round(x, 4) for x in Share(8, 10).interval()]
        [0.4902, 0.9433]
        """
        if not self.total:
            return (math.nan, math.nan)
        n, p = self.total, self.value
        centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
        return (max(0.0, centre - half), min(1.0, centre + half))


@dataclass(frozen=True)
class TurnReport:
    """One turn: each agent's accuracy, all agents' together, the majority vote's, and how often all agree."""

    agents: dict[str, Share]
    team: Share
    majority: Share
    agreement: Share


@dataclass(frozen=True)
class Flips:
    """Changes between a turn and the next: counts over agents and ``questions``, of those that went on."""

    wrong_to_right: int
    right_to_wrong: int
    stayed_right: int
    stayed_wrong: int
    questions: int

    def shares(self) -> dict[str, Share]:
        """Improved, declined and same, as shares of all answers that were given in both turns."""
        same = self.stayed_right + self.stayed_wrong
        answers = max(1, self.wrong_to_right + self.right_to_wrong + same)
        counts = {"improved": self.wrong_to_right, "declined": self.right_to_wrong, "same": same}
        return {name: Share(count * self.questions / answers, self.questions) for name, count in counts.items()}


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation; ``baselines`` are answers without debate at the same number of sampled tokens.

    ``finished``: the share of questions on which consensus ended the dialogue, by the turn it was reached in.
    """

    turns: list[TurnReport]
    flips: list[Flips]
    questions: int
    tokens: int
    baselines: dict[str, Share] = field(default_factory=dict)
    finished: list[float] = field(default_factory=list)

    def final(self) -> Share:
        """Accuracy of all agents together at the last turn."""
        return self.turns[-1].team

    def metrics(self) -> dict[str, float]:
        """Flat numbers for logs."""
        flat: dict[str, float] = {}
        for number, turn in enumerate(self.turns, 1):
            flat[f"accuracy/turn_{number}"] = turn.team.value
            flat[f"majority/turn_{number}"] = turn.majority.value
            flat[f"agreement/turn_{number}"] = turn.agreement.value
            flat |= {f"accuracy/turn_{number}/{agent}": share.value for agent, share in turn.agents.items()}
        for number, flips in enumerate(self.flips, 1):
            flat[f"flips/{number}_to_{number + 1}/wrong_to_right"] = float(flips.wrong_to_right)
            flat[f"flips/{number}_to_{number + 1}/right_to_wrong"] = float(flips.right_to_wrong)
            flat |= {
                f"change/{number}_to_{number + 1}/{name}": s.value for name, s in flips.shares().items() if s.total
            }
        if any(self.finished):
            flat |= {f"finished/turn_{number}": share for number, share in enumerate(self.finished, 1)}
        return flat

    def to_json(self) -> dict[str, Any]:
        """Everything, with the intervals written out."""

        def plain(value: Any) -> Any:
            if isinstance(value, Share):
                low, high = value.interval()
                known = {"value": value.value, "low": low, "high": high} if value.total else {}  # JSON has no NaN
                return {"count": value.count, "total": value.total, "value": None, "low": None, "high": None, **known}
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
            if not 0 <= entry["count"] <= entry["total"]:
                raise ValueError(f"{entry['count']} of {entry['total']} is no share")
            return Share(entry["count"], entry["total"])

        def change(entry: dict[str, Any]) -> Flips:
            counts = {"questions": 0, **{name: count for name, count in entry.items() if name != "shares"}}
            if not all(isinstance(count, int) for count in counts.values()):
                raise ValueError(f"{counts} are no counts")
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
        counts = (record.get("questions", 0), record.get("tokens", 0))
        return cls(turns, flips, *counts, baselines, record.get("finished", []))


def evaluate_dialogues(dialogues: Sequence[Dialogue]) -> Evaluation:
    """Measure graded dialogues; questions whose answers cannot be graded (``correct`` None) are left out of shares."""
    turns = [_turn_report(dialogues, turn) for turn in range(max(d.turns() for d in dialogues))]
    flips = [_flips(dialogues, turn) for turn in range(len(turns) - 1)]
    tokens = sum(len(u.response_ids) for d in dialogues for u in d.utterances)
    ended = [d.turns() for d in dialogues if d.outcome == "consensus"]
    finished = [ended.count(turn + 1) / len(dialogues) for turn in range(len(turns))]
    return Evaluation(turns, flips, len(dialogues), tokens, finished=finished)


def majority_credit(grades: Sequence[Grade]) -> float:
    """The expected correctness of the majority answer under the tie rule.

    >>> right, wrong, none = Grade("4", True, ""), Grade("5", False, ""), Grade(None, False, "")
    >>> majority_credit([right, wrong]), majority_credit([right, none, none]), majority_credit([wrong, wrong, right])
    (0.5, 1.0, 0.0)
    """
    votes = Counter(g.answer for g in grades if g.answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == most]
    right = {g.answer for g in grades if g.correct}
    return sum(answer in right for answer in tied) / len(tied)


def _turn_report(dialogues: Sequence[Dialogue], turn: int) -> TurnReport:
    by_agent: dict[str, list[bool]] = {}
    votes, agreed, voted, right = 0.0, 0, 0, 0.0
    for dialogue in dialogues:
        standing = dialogue.at(min(turn, dialogue.turns() - 1))
        grades = [u.grade for u in standing if u.grade is not None and u.grade.correct is not None]
        for utterance in standing:
            if utterance.grade is not None and utterance.grade.correct is not None:
                by_agent.setdefault(utterance.agent, []).append(utterance.grade.correct)
        if grades:
            votes += majority_credit(grades)
            agreed += grades[0].answer is not None and len({g.answer for g in grades}) == 1
            voted += 1
            right += sum(bool(g.correct) for g in grades) / len(grades)
    return TurnReport(
        agents={agent: Share(sum(own), len(own)) for agent, own in by_agent.items()},
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
