"""What the processes of a group are told when they start. Imports no torch."""

from dataclasses import dataclass

from maporl.config.schema import Config


@dataclass(frozen=True)
class GroupSpec:
    """A group and its run.

    Args:
        name: the group's name.
        config: the run's configuration.
        policies: the policies of the group.
        trained: those of them that are trained.
        updates: the number of updates of the run, over which learning rates are scheduled.
        critics: whether the policies have critics.
        outputs: the number of outputs of each critic.
        devices: the number of processes that train.
        strategy: how they hold the weights (:class:`maporl.config.cluster.LearnerPlaces`).
        replicas: the number of processes that sample.
        rows: the most answers that one of them samples at a time. None: all that are asked for.
    """

    name: str
    config: Config
    policies: tuple[str, ...]
    trained: tuple[str, ...]
    updates: int
    critics: bool
    outputs: int
    devices: int
    strategy: str
    replicas: int
    rows: int | None
