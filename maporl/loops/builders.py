"""``BUILDERS`` names the builders (:mod:`maporl.loops.builder`). No torch."""

from maporl.config.imports import Parts
from maporl.loops.pairs import Comparisons, Gap, Siblings
from maporl.loops.ranked import RankHalves, TrajectoryPairs
from maporl.loops.singles import BestOf, Signs, Threshold

BUILDERS = Parts(
    {
        "threshold": Threshold,
        "siblings": Siblings,
        "best_of": BestOf,
        "gap": Gap,
        "signs": Signs,
        "flatten": "maporl.methods.chain_of_agents:Flatten",
        "repair": "maporl.methods.agent_rlvr:Repair",
        "comparisons": Comparisons,
        "trajectory_pairs": TrajectoryPairs,
        "rank_halves": RankHalves,
    }
)
"""Name -> builder. What one method alone uses is in :mod:`maporl.methods`, and imported when it is looked up."""
