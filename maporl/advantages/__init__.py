"""Advantages: a return, a baseline, a scale and transforms, over rows that share a key.

The dicts ``RETURNS``, ``BASELINES``, ``SCALES`` and ``TRANSFORMS`` name every choice. The first three hold a
:class:`Return`, a :class:`Baseline` and a :class:`Scale` each, which say what they compare and what they need.
"""

from maporl.advantages.baselines import BASELINES, BaselineState
from maporl.advantages.batch import COLUMNS, TurnBatch
from maporl.advantages.estimator import Estimates, check_columns, estimate, estimate_all
from maporl.advantages.returns import RETURNS
from maporl.advantages.scales import SCALES
from maporl.advantages.slots import Baseline, Return, Scale
from maporl.advantages.transforms import TRANSFORMS, Transform, build_transforms
from maporl.config.schema import AdvantageConfig, AdvantageTerm

__all__ = [
    "BASELINES",
    "COLUMNS",
    "RETURNS",
    "SCALES",
    "TRANSFORMS",
    "AdvantageConfig",
    "AdvantageTerm",
    "Baseline",
    "BaselineState",
    "Estimates",
    "Return",
    "Scale",
    "Transform",
    "TurnBatch",
    "build_transforms",
    "check_columns",
    "estimate",
    "estimate_all",
]
