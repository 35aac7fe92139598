"""Advantages: a return, a baseline, a scale and transforms, over rows that share a key.

The dicts ``RETURNS``, ``BASELINES``, ``SCALES`` and ``TRANSFORMS`` name every choice. The first three hold a
:class:`Return`, a :class:`Baseline` and a :class:`Scale` each, which say what they compare and what they need.
"""

from maporl.advantages.baselines import BASELINES as BASELINES
from maporl.advantages.batch import TurnBatch as TurnBatch
from maporl.advantages.estimator import estimate as estimate
from maporl.advantages.returns import RETURNS as RETURNS
from maporl.advantages.scales import SCALES as SCALES
from maporl.advantages.slots import Baseline as Baseline
from maporl.advantages.slots import Return as Return
from maporl.advantages.slots import Scale as Scale
from maporl.advantages.transforms import TRANSFORMS as TRANSFORMS
from maporl.advantages.transforms import Transform as Transform
from maporl.config.schema import AdvantageConfig as AdvantageConfig
from maporl.config.schema import AdvantageTerm as AdvantageTerm
