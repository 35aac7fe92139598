"""``BUILDERS`` names the builders (:mod:`maporl.loops.builder`). No torch."""

from maporl.loops.builder import Builder
from maporl.loops.pairs import Comparisons, Gap, Repair, Siblings
from maporl.loops.ranked import RankHalves, TrajectoryPairs
from maporl.loops.singles import BestOf, Flatten, Signs, Threshold

BUILDERS: dict[str, type[Builder]] = {
    "threshold": Threshold,
    "siblings": Siblings,
    "best_of": BestOf,
    "gap": Gap,
    "signs": Signs,
    "flatten": Flatten,
    "repair": Repair,
    "comparisons": Comparisons,
    "trajectory_pairs": TrajectoryPairs,
    "rank_halves": RankHalves,
}
"""Name -> builder."""
