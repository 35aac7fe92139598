"""The section ``cluster``: where a run samples and learns."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from maporl.config.numbers import STRICT, Natural, Positive


@dataclass(frozen=True, config=STRICT)
class PoolSection:
    """Machines of one kind. One of the two is given.

    Args:
        accelerator: the type of their accelerators, as Ray names it, such as ``H100``.
        resource: a custom resource that they have, as ``ray start --resources`` was told.

    Raises:
        ValueError: none of the two is given, or both.
    """

    accelerator: str | None = None
    resource: str | None = None

    def __post_init__(self) -> None:
        if (self.accelerator is None) == (self.resource is None):
            raise ValueError("give either accelerator, the type as Ray names it, or resource, a custom resource")

    def __str__(self) -> str:
        kind = "accelerator" if self.accelerator is not None else "resource"
        return f"{kind} {self.accelerator or self.resource}"


@dataclass(frozen=True, config=STRICT)
class CountedPlaces:
    """Places for processes on CPUs, which are counted as devices are.

    Args:
        cpu: the number of places in the whole cluster. Ray that is started here has them; machines of a cluster that is
            joined have them as the custom resource ``maporl_place``.
    """

    cpu: Positive


@dataclass(frozen=True, config=STRICT)
class LearnerPlaces:
    """The processes that train the policies of a group.

    Args:
        devices: the number of processes, each on a device of its own.
        strategy: how they hold the weights: ``replicated`` (each has everything), ``fsdp2``, ``zero2`` or ``zero3``.
        pool: the machines that they are on, by the name of a pool. None: any.
        node: ``one``: they are on one machine. ``any``: on as many as it takes.
    """

    devices: Positive = 1
    pool: str | None = None
    node: Literal["one", "any"] = "one"
    strategy: Literal["replicated", "fsdp2", "zero2", "zero3"] = "replicated"


@dataclass(frozen=True, config=STRICT)
class EnginePlaces:
    """The processes that sample from the policies of a group, each with a copy of their weights on a device of its own.

    Args:
        replicas: the number of processes.
        rows: the most answers that one of them samples at a time. None: all that are asked for.
        pool: the machines that they are on, by the name of a pool. None: any.
    """

    replicas: Positive = 1
    pool: str | None = None
    rows: Positive | None = None


@dataclass(frozen=True, config=STRICT)
class GroupSection:
    """Policies that one set of processes trains and samples from. Several of different bases take turns there.

    Args:
        policies: their names.
        learner: the processes that train them.
        engines: the processes that sample from them.
        sharing: ``apart``: each process has a device of its own. ``turns``: the group shares devices with all others of the same
            pool that take turns. One process of a device works at a time. ``sleep``: the processes that sample are on the devices
            of those that train, and sleep while these work. This needs ``engine: vllm``.
    """

    policies: Annotated[list[str], Field(min_length=1)]
    learner: LearnerPlaces = dataclasses.field(default_factory=LearnerPlaces)
    engines: EnginePlaces = dataclasses.field(default_factory=EnginePlaces)
    sharing: Literal["apart", "turns", "sleep"] = "apart"


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
    engine_replacements: Natural = 20
    group_restarts: Natural = 5
    snapshots: bool = True


@dataclass(frozen=True, config=STRICT)
class ClusterSection:
    """Where a run samples and learns.

    Args:
        backend: ``local``: in the processes that the launcher started. ``ray``: in processes that Ray starts, a group of
            them for each base model, which learn at the same time.
        address: the address of a Ray cluster to join, or ``auto``. None starts Ray on this machine.
        devices: what processes are placed on. ``auto``: on the accelerators that Ray reports, or on CPUs if it reports none.
            A number of places on CPUs counts them as if they were devices.
        pools: kinds of machines by name. By default a process may be on any machine.
        groups: the groups by name. By default there is one for each base model.
        batching: ``steps``: all dialogues of an update take their steps together, as with ``local``. ``flow``: each dialogue goes on
            as soon as its answers are there.
        on_update: what happens to dialogues in progress when weights change (``training.async_depth``). ``finish``: answers that have
            begun end with the old weights, and the next ones have the new weights. ``drain``: dialogues end first.
        scoring: processes that score.
        failures: what happens when processes die or hang.
        variables: the names of environment variables that the processes get, besides those of the system and of the libraries that
            train and sample (:mod:`trl_ext.process.inherited`). Ray that is started here passes on no others, and so no keys.

    Raises:
        ValueError: ``variables`` are given for a cluster that is joined.
    """

    backend: Literal["local", "ray"] = "local"
    address: str | None = None
    devices: Literal["auto"] | CountedPlaces = "auto"
    pools: dict[str, PoolSection] = dataclasses.field(default_factory=dict, hash=False)
    groups: dict[str, GroupSection] = dataclasses.field(default_factory=dict, hash=False)
    batching: Literal["steps", "flow"] = "steps"
    on_update: Literal["finish", "drain"] = "finish"
    scoring: ScoringSection = dataclasses.field(default_factory=ScoringSection)
    failures: FailuresSection = dataclasses.field(default_factory=FailuresSection)
    variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.variables and (self.address is not None or self.backend == "local"):
            why = (
                "the machines of a cluster that is joined have their own"
                if self.address
                else "backend: local starts no processes"
            )
            raise ValueError(f"variables: {why}; leave it out")
