"""The section ``cluster``: where a run samples and learns."""

import dataclasses
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=False)
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=STRICT)
class LearnerPlaces:
    """The processes that train the policies of a group.

    Args:
        devices: the number of processes, each on a device of its own.
        strategy: how they hold the weights: ``replicated`` (each has everything), ``fsdp2``, ``zero2`` or ``zero3``.
    """

    devices: Positive = 1
    strategy: Literal["replicated", "fsdp2", "zero2", "zero3"] = "replicated"


@dataclass(frozen=True, config=STRICT)
class EnginePlaces:
    """The processes that sample from the policies of a group, each with a copy of their weights on a device of its own.

    Args:
        replicas: the number of processes.
        rows: the most answers that one of them samples at a time. None: all that are asked for.
    """

    replicas: Positive = 1
    rows: Positive | None = None


@dataclass(frozen=True, config=STRICT)
class GroupSection:
    """Policies that one set of processes trains and samples from. Several of different bases take turns there.

    Args:
        policies: their names.
        learner: the processes that train them.
        engines: the processes that sample from them.
    """

    policies: Annotated[list[str], Field(min_length=1)]
    learner: LearnerPlaces = dataclasses.field(default_factory=LearnerPlaces)
    engines: EnginePlaces = dataclasses.field(default_factory=EnginePlaces)


@dataclass(frozen=True, config=STRICT)
class VerifierPlaces:
    """The processes that score with ``reward.verifier.model``, each with a copy of it on a device of its own.

    Args:
        replicas: the number of processes.
    """

    replicas: Positive = 1


@dataclass(frozen=True, config=STRICT)
class ScoringSection:
    """Processes that score.

    Args:
        verifier: those of the verifier. None: it is in the driver, or behind servers.
    """

    verifier: VerifierPlaces | None = None


@dataclass(frozen=True, config=STRICT)
class FailuresSection:
    """What happens when processes die or hang.

    Args:
        deadline: the seconds after which a call that has not been answered counts as failed.
        engine_replacements: how often engines are replaced in a run before it ends.
        group_restarts: how often the processes that train a group are started again in a run before it ends.
        snapshots: whether main memory takes a copy of weights and optimizers after every update, from which a group that
            died is built again. Otherwise the run ends when a process that trains dies.
    """

    deadline: Annotated[float, Field(gt=0)] = 900.0
    engine_replacements: Annotated[int, Field(ge=0)] = 20
    group_restarts: Annotated[int, Field(ge=0)] = 5
    snapshots: bool = True


@dataclass(frozen=True, config=STRICT)
class ClusterSection:
    """Where a run samples and learns.

    Args:
        backend: ``local``: in the processes that the launcher started. ``ray``: in processes that Ray starts, a group of
            them for each base model, which learn at the same time.
        address: the address of a Ray cluster to join, or ``auto``. None starts Ray on this machine.
        groups: the groups by name. By default there is one for each base model.
        batching: ``steps``: all dialogues of an update take their steps together, as with ``local``. ``flow``: each dialogue goes on
            as soon as its answers are there.
        scoring: processes that score.
        failures: what happens when processes die or hang.
    """

    backend: Literal["local", "ray"] = "local"
    address: str | None = None
    groups: dict[str, GroupSection] = dataclasses.field(default_factory=dict, hash=False)
    batching: Literal["steps", "flow"] = "steps"
    scoring: ScoringSection = dataclasses.field(default_factory=ScoringSection)
    failures: FailuresSection = dataclasses.field(default_factory=FailuresSection)
