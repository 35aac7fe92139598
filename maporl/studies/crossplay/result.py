"""Cross-play: the accuracy of teams that trained together, and of teams whose agents come from different runs. No
torch.

Agents that train together may learn to use what others say, or they may learn habits that only their own partners
understand. Accuracy on held-out questions does not tell the two apart. Teams of agents from different runs do (Hu et
al. 2020, "Other-Play" for zero-shot coordination, arXiv 2003.02979): self-play is the diagonal of the matrix, and
cross-play is the rest.

All teams answer the same questions, so every difference is paired by question. In the means of self-play and of
cross-play, every run's agent takes every seat equally often. If the agents' skills simply added up, the gap between
the two means would therefore be 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from maporl.evaluation.metrics import Difference, Share, numbers_of, proves_nothing, unanswered
from maporl.types import Dialogue

MOST_TEAMS = 64
"""The number of teams up to which all of them are played."""
_MOST_NAMES = 200
"""The most runs and seats of a recorded cross-play. The number of its teams grows with their product."""

Right = tuple[float | None, ...]
"""For each question, the share of the final answers that are right; None if they cannot be graded."""


def final_right(dialogue: Dialogue) -> float | None:
    """Return the share of right answers in the last turn of a graded dialogue, 0 if nobody has answered, and None if no
    answer can be graded."""
    grades = [u.grade for u in dialogue.at(dialogue.turns() - 1) if u.grade is not None and u.grade.correct is not None]
    if not grades:
        return 0.0 if unanswered(dialogue) else None
    return sum(bool(g.correct) for g in grades) / len(grades)


def seatings(runs: int, seats: int, most: int = MOST_TEAMS) -> list[tuple[int, ...]]:
    """Return the teams to play, each as the number of the run that fills each seat.

    They are all ``runs ** seats`` teams, if these are at most ``most``. Otherwise they are the teams that trained
    together, and these teams with each single seat taken by another run.

    >>> seatings(2, 2)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> len(seatings(3, 4)), len(seatings(3, 4, most=81))
    (27, 81)
    """
    if runs**seats <= most:
        return list(product(range(runs), repeat=seats))
    return sorted(
        {
            (*(run,) * seat, other, *(run,) * (seats - seat - 1))
            for run, seat, other in product(range(runs), range(seats), range(runs))
        }
    )


@dataclass(frozen=True)
class CrossTeam:
    """A team that was played: the number of the run of each seat, and its result on each question.

    ``survives`` is the share of time that evolution spends in it
    (:func:`maporl.studies.crossplay.alpha_rank.with_survival`), or None.
    """

    runs: tuple[int, ...]
    right: Right
    survives: float | None = None

    @property
    def self_play(self) -> bool:
        """Whether all its agents trained together."""
        return len(set(self.runs)) == 1

    def final(self) -> Share:
        """Return the accuracy of the last turn, as :meth:`maporl.evaluation.metrics.Evaluation.final` does."""
        return share_of(self.right)


@dataclass(frozen=True)
class CrossPlay:
    """The result of cross-play.

    Args:
        runs: the names of the runs.
        seats: the names of the agents that come from different runs. All others are the same in every team.
        teams: the teams. All of them answered the same questions, in the same order.
        temperature: the sampling temperature; 0 is greedy.
        seed: the seed of the sampling, which is the same for all teams.
        left_out: the number of held-out questions that were not asked, because another run was trained on them.

    Raises:
        ValueError: a team is missing, the teams answered different numbers of questions, or there is not a single
            question on which all teams' answers could be graded.
    """

    runs: tuple[str, ...]
    seats: tuple[str, ...]
    teams: tuple[CrossTeam, ...]
    temperature: float = 0.0
    seed: int = 0
    left_out: int = 0

    def __post_init__(self) -> None:
        needed = seatings(len(self.runs), len(self.seats), most=0)
        if missing := [runs for runs in needed if runs not in self._by_runs]:
            raise ValueError(f"expected every team with at most one seat replaced, but {missing[0]} was not played")
        if len({len(team.right) for team in self.teams}) > 1:
            raise ValueError("expected that all teams answered the same questions, got different numbers of answers")
        if all(one is None for one in mean_by_question(self.teams)):
            raise ValueError("expected a question on which all teams' answers can be graded, got none")

    @property
    def questions(self) -> int:
        """The number of questions."""
        return len(self.teams[0].right)

    @cached_property
    def _by_runs(self) -> dict[tuple[int, ...], CrossTeam]:
        return {team.runs: team for team in self.teams}

    def cell(self, row: int, column: int) -> Share:
        """Return a cell of the matrix.

        With two seats, it is the accuracy of the first agent of run ``row`` with the second agent of run ``column``.
        With more seats, it is the mean accuracy of the team of run ``row`` with one seat taken by run ``column``, over
        the seats.
        """
        if row == column:
            return self._by_runs[(row,) * len(self.seats)].final()
        if len(self.seats) == 2:
            return self._by_runs[row, column].final()
        row_team = (row,) * len(self.seats)
        mixed = [(*row_team[:seat], column, *row_team[seat + 1 :]) for seat in range(len(row_team))]
        return share_of(mean_by_question([self._by_runs[runs] for runs in mixed]))

    def matrix(self) -> list[list[Share]]:
        """Return all cells, row by row."""
        numbers = range(len(self.runs))
        return [[self.cell(row, column) for column in numbers] for row in numbers]

    def self_play(self) -> Share:
        """Return the mean accuracy of the teams that trained together."""
        return share_of(mean_by_question([team for team in self.teams if team.self_play]))

    def cross_play(self) -> Share:
        """Return the mean accuracy of all other teams."""
        return share_of(mean_by_question([team for team in self.teams if not team.self_play]))

    def gap(self) -> Difference:
        """Return self-play minus cross-play. The interval is over questions; the runs are taken as given."""
        self_play = [team for team in self.teams if team.self_play]
        return difference([team for team in self.teams if not team.self_play], self_play)

    def proves_nothing(self) -> str:
        """Return why the gap proves nothing, as :func:`maporl.evaluation.metrics.proves_nothing`: a run is a seed."""
        return proves_nothing([[one for one in t.right if one is not None] for t in self.teams], len(self.runs))

    def against_own_teams(self, team: CrossTeam) -> Difference:
        """Return a team minus the mean of the teams that its members trained in, one for each member."""
        return difference([self._by_runs[(run,) * len(self.seats)] for run in team.runs], [team])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values: what :meth:`from_json` reads, and what follows from it."""
        return {
            "runs": list(self.runs),
            "seats": list(self.seats),
            "questions": self.questions,
            "temperature": self.temperature,
            "seed": self.seed,
            "left_out": self.left_out,
            "self_play": numbers_of(self.self_play()),
            "cross_play": numbers_of(self.cross_play()),
            "gap": vars(self.gap()),
            "proves_nothing": self.proves_nothing(),
            "matrix": [[numbers_of(cell) for cell in row] for row in self.matrix()],
            "teams": [
                {
                    "runs": list(team.runs),
                    "final": numbers_of(team.final()),
                    "against_own_teams": None if team.self_play else vars(self.against_own_teams(team)),
                    "right": list(team.right),
                    "survives": team.survives,
                }
                for team in self.teams
            ],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CrossPlay":
        """Inverse of :meth:`to_json`.

        Raises:
            KeyError: the record lacks one of its parts.
            TypeError: a part is of the wrong kind.
            ValueError: a share or a name is wrong, or as for :class:`CrossPlay`.
        """
        names = [*record["runs"], *record["seats"]]
        if len(names) > _MOST_NAMES:
            raise ValueError(f"expected at most {_MOST_NAMES} runs and seats, got {len(names)}")
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected names of runs and seats, got {names!r:.80}")
        teams = tuple(CrossTeam(tuple(t["runs"]), tuple(t["right"]), t.get("survives")) for t in record["teams"])
        if not all(one is None or 0 <= one <= 1 for team in teams for one in (*team.right, team.survives)):
            raise ValueError("expected shares of right answers, and of time, from 0 to 1")
        numbers = [record[name] for name in ("temperature", "seed", "left_out")]
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"expected temperature, seed and left_out as numbers, got {numbers!r:.80}")
        return cls(tuple(record["runs"]), tuple(record["seats"]), teams, *numbers)


def mean_by_question(teams: Sequence[CrossTeam]) -> Right:
    """Return the mean of the teams' results on each question; None if a team's answers to it cannot be graded."""
    graded = [[one for one in each if one is not None] for each in zip(*(team.right for team in teams), strict=True)]
    return tuple(sum(results) / len(results) if len(results) == len(teams) else None for results in graded)


def share_of(right: Right) -> Share:
    """Return the mean over the questions that could be graded, as a share of these questions."""
    graded = [one for one in right if one is not None]
    return Share(sum(graded), len(graded))


def difference(before: Sequence[CrossTeam], after: Sequence[CrossTeam]) -> Difference:
    """Return the mean of the teams ``after`` minus the mean of the teams ``before``, paired by question.

    Only questions on which all these teams' answers could be graded count.
    """
    both = zip(mean_by_question(before), mean_by_question(after), strict=True)
    return Difference.of([(old, new) for old, new in both if old is not None and new is not None])
