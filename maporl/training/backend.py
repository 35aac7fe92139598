"""What a trainer asks of a backend, which trains and samples in other processes.

Without one, everything is in this process.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from maporl.config import Config
from maporl.engines.base import Engine
from maporl.rewards.base import RewardSource
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.team.past_policies import PastPolicies
from maporl.team.team import Team
from maporl.training.args import MultiAgentPPOConfig
from trl_ext.learning.config import PPOv2Config


@runtime_checkable
class Backend(Protocol):
    """Where a run trains and samples.

    The trainer plays, scores and computes advantages. It asks what :meth:`start` returns for the verbs of
    :class:`trl_ext.learning.learners.Learning`.
    """

    def past_policies(self, section: OpponentPool, team: Team, seed: int) -> PastPolicies:
        """Return the past opponents of a run, before :meth:`describe`."""
        ...

    def untrained(self, team: Team) -> UntrainedWeights:
        """Return the weights that the policies of ``team`` started from. They are asked after :meth:`start`."""
        ...

    def describe(self, config: Config, team: Team, args: MultiAgentPPOConfig, critics: bool) -> Mapping[str, Any]:
        """Return what the trainer must know of each learner: its name, tokenizer, critic and learning rate.

        The processes load the team that ``config`` describes. The models of ``team`` have no weights.
        """
        ...

    def start(self, learners: Mapping[str, Any], updates: int, critics: bool, outputs: int) -> Any:
        """Start the processes, and return what trains the ``learners`` in ``updates`` updates."""
        ...

    def engine(self, team: Team, args: PPOv2Config) -> Engine:
        """Return the engine that samples from the weights that are trained."""
        ...

    def sources(self, config: Config) -> Mapping[str, RewardSource]:
        """Return the reward sources that ask the backend's processes, by name. :meth:`start` starts these."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what the processes did since the last time, to log after every update."""
        ...

    def stop_sampling(self) -> None:
        """End the processes that sample, because a signal ends the run.

        Those that train are asked to save afterwards.
        """
        ...

    def end_hung(self) -> None:
        """End and replace the processes that train and do not answer at all, because a signal has come.

        This is asked in a thread.
        """
        ...

    def run_ended(self) -> None:
        """End the processes, unless the user keeps them (``with backend:``).

        A trainer calls this when its run is over.
        """
        ...

    def end(self) -> None:
        """End the processes."""
        ...
