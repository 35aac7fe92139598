"""Comparisons of numbers that may miss each other by rounding alone. No torch.

The mean of 0.1, 0.1 and 0.1 is 0.10000000000000002, and 0.1 + 0.2 is not 0.3. A rule that pays what is above a mean, or
that leaves out what is exactly 0, would then decide by the last bit. Rules, builders of data sets and advantages
compare with these functions instead.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

ROUNDING = 1e-12
"""Float64 numbers that differ by less than this share of the larger one count as equal. Sums of thousands of numbers
are more exact than that, and rewards are coarser."""
LEAST = 1e-14
"""No difference of rewards is as small as this. It is what is left where sums of numbers about 1 cancel each other."""


def tolerance(largest: float) -> float:
    """Return how far two results of one size, at most ``largest``, may be apart by rounding alone."""
    return max(ROUNDING * largest, LEAST)


def difference(one: float, other: float) -> float:
    """Return ``one - other``, and exactly 0 if only rounding is left of it.

    >>> difference(0.1 + 0.2, 0.3), difference(3.0, 1.0), difference(0.1 + 0.2 - 0.3, 0.0)
    (0.0, 2.0, 0.0)
    """
    gap = one - other
    return 0.0 if abs(gap) < tolerance(max(abs(one), abs(other))) else gap


def exceeds(one: float, other: float) -> bool:
    """Return whether ``one`` is greater than ``other`` by more than rounding.

    >>> exceeds(0.1 + 0.2, 0.3), exceeds(0.31, 0.3)
    (False, True)
    """
    return difference(one, other) > 0


def differ(values: Iterable[float]) -> bool:
    """Return whether some of the ``values`` differ by more than rounding.

    >>> differ([0.1 + 0.2, 0.3]), differ([0.1, 0.2]), differ([])
    (False, True, False)
    """
    numbers = list(values)
    return bool(numbers) and exceeds(max(numbers), min(numbers))


def deviations(values: Sequence[float]) -> list[float]:
    """Return each of the ``values`` minus their mean, and exactly 0 where only rounding is left of it.

    >>> deviations([0.1, 0.1, 0.1]), deviations([1.0, 2.0, 3.0])
    ([0.0, 0.0, 0.0], [-1.0, 0.0, 1.0])
    """
    if not values:
        return []
    middle, least = fmean(values), tolerance(max(map(abs, values)))
    offsets = [value - middle for value in values]
    return [0.0 if abs(offset) < least else offset for offset in offsets]


def mean_rank(values: Sequence[float]) -> float:
    """Return the mean of ``values`` to 12 digits, so that means that are equal but for rounding are in no order.

    >>> mean_rank([0.1, 0.1, 0.1]) == mean_rank([0.1])
    True
    """
    return float(f"{fmean(values):.12g}")
