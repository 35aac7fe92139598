"""Words and numbers for sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from maporl.evaluation.metrics import Z95, Share


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "update"), counted(20, "reply"), counted(3, "game")
    ('1 update', '20 replies', '3 games')
    """
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def few_updates(number: int) -> str:
    """What follows "the first" or "the last".

    >>> few_updates(1), few_updates(3)
    ('update', '3 updates')
    """
    return "update" if number == 1 else counted(number, "update")


def listed(names: Sequence[str]) -> str:
    """Names with commas and an "and".

    >>> listed(["a", "b", "c"]), listed(["a"]), listed([])
    ('a, b and c', 'a', '')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def percent(share: Share) -> str:
    """A share with its 95% interval.

    >>> percent(Share(8, 10))
    '80.0% (49.0 to 94.3%)'
    """
    low, high = share.interval()
    return f"{share.value:.1%} ({100 * low:.1f} to {high:.1%})"


@dataclass(frozen=True)
class Difference:
    """The mean over questions of paired differences between two shares. ``low`` and ``high`` are its 95% interval: normal, from the
    standard deviation of the differences."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> "Difference":
        """The difference of ``pairs``: (before, after) on each question.

        >>> Difference.of([(0, 1), (0, 1), (0, 0), (1, 0)]).points()
        '+25.0 points (95% interval -68.8 to +100.0, compared question by question)'
        """
        own = [after - before for before, after in pairs]
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((d - mean) ** 2 for d in own) / max(1, len(own) - 1))
        half = Z95 * deviation / math.sqrt(len(own))
        return cls(mean, max(-1.0, mean - half), min(1.0, mean + half))

    @property
    def sign(self) -> int:
        """1 where the whole interval is above 0, -1 where it is below 0, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def brief(self) -> str:
        """In percentage points, for a table."""
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    def points(self) -> str:
        """In percentage points, for a sentence."""
        return f"{100 * self.mean:+.1f} points (95% interval {100 * self.low:+.1f} to {100 * self.high:+.1f}, compared question by question)"
