"""What a trainer asks of a backend, which trains and samples in other processes. Without one, everything is in this process."""

from collections.abc import Mapping
from typing import Any, Protocol

from maporl.config.schema import RewardSection
from maporl.engines.base import Engine
from maporl.rewards.base import RewardSource
from maporl.team.team import Team
from trl_ext.ppov2_config import PPOv2Config


class Backend(Protocol):
    """Where a run trains and samples.

    The trainer plays, scores and computes advantages. It asks what :meth:`start` returns for the verbs of
    :class:`trl_ext.learning.Learning`.
    """

    def describe(self, team: Team, args: PPOv2Config, critics: bool) -> Mapping[str, Any]:
        """Return what the trainer must know of each learner: its name, tokenizer, critic and learning rate."""
        ...

    def start(self, learners: Mapping[str, Any], updates: int, critics: bool, outputs: int) -> Any:
        """Start the processes, and return what trains the ``learners`` in ``updates`` updates."""
        ...

    def engine(self, team: Team, args: PPOv2Config) -> Engine:
        """Return the engine that samples from the weights that are trained."""
        ...

    def sources(self, reward: RewardSection) -> Mapping[str, RewardSource]:
        """Return the reward sources that ask the backend's processes, by name. :meth:`start` starts these."""
        ...

    def end(self) -> None:
        """End the processes."""
        ...
