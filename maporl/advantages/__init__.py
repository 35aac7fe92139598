"""Advantages: return o baseline o scale o post, with a group key. The dicts below name every slot there is."""

from maporl.advantages.baselines import BASELINES, BaselineState
from maporl.advantages.batch import COLUMNS, TurnBatch
from maporl.advantages.estimator import Estimates, check_columns, estimate, estimate_all
from maporl.advantages.posts import POSTS, Post, build_posts
from maporl.advantages.returns import RETURNS
from maporl.advantages.scales import SCALES
from maporl.sections import AdvantageConfig

__all__ = [
    "BASELINES",
    "COLUMNS",
    "POSTS",
    "RETURNS",
    "SCALES",
    "AdvantageConfig",
    "BaselineState",
    "Estimates",
    "Post",
    "TurnBatch",
    "build_posts",
    "check_columns",
    "estimate",
    "estimate_all",
]
