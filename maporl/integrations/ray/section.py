"""The section ``cluster``: where a run samples and learns."""

from typing import Annotated, Literal

from pydantic import Field

from maporl.sections import Natural, Positive, brought, made, section
from trl_ext.ppo.options import option


@section()
class PoolSection:
    """Machines of one kind. One of the two is given.

    Raises:
        ValueError: none of the two is given, or both.
    """

    accelerator: str | None = option(None, "The type of their accelerators, as Ray names it, such as H100.")
    resource: str | None = option(None, "A custom resource that they have, as `ray start --resources` was told.")

    def __post_init__(self) -> None:
        if (self.accelerator is None) == (self.resource is None):
            raise ValueError("give either accelerator, the type as Ray names it, or resource, a custom resource")

    def __str__(self) -> str:
        kind = "accelerator" if self.accelerator is not None else "resource"
        return f"{kind} {self.accelerator or self.resource}"


@section()
class CountedPlaces:
    """Places for processes on CPUs, which are counted as devices are."""

    cpu: Positive = option(
        help="Number of places in the whole cluster. Ray that is started here has them; machines of a cluster that is "
        "joined have them as the custom resource maporl_place.",
    )


@section()
class LearnerPlaces:
    """The processes that train the policies of a group."""

    devices: Positive = option(1, "Number of processes, each on a device of its own.")
    pool: str | None = option(None, "The machines that they are on, by the name of a pool. None: any.")
    node: Literal["one", "any"] = option("one", "one: they are on one machine. any: on as many as it takes.")
    strategy: Literal["replicated", "fsdp2", "zero2", "zero3"] = option(
        "replicated",
        "How they hold the weights: replicated (each has everything), fsdp2, zero2 or zero3.",
    )


@section()
class EnginePlaces:
    """The processes that sample from the policies of a group, each with a copy of their weights on a device of its
    own."""

    replicas: Positive = option(1, "Number of processes.")
    pool: str | None = option(None, "The machines that they are on, by the name of a pool. None: any.")
    rows: Positive | None = option(
        None,
        "Most answers that one of them samples at a time. None: all that are asked for.",
    )


@section()
class GroupSection:
    """Policies that one set of processes trains and samples from. Several of different bases take turns there."""

    policies: Annotated[list[str], Field(min_length=1)] = option(
        help="Names of the policies. Several of different bases take turns.",
    )
    learner: LearnerPlaces = option(help="The processes that train them.", factory=LearnerPlaces)
    engines: EnginePlaces = option(help="The processes that sample from them.", factory=EnginePlaces)
    sharing: Literal["apart", "turns", "sleep"] = option(
        "apart",
        "apart: each process has a device of its own. turns: the group shares devices with all others of the same "
        "pool that take turns; one process of a device works at a time. sleep: the processes that sample are on "
        "the devices of those that train, and sleep while these work, which needs engine: vllm.",
    )


@section()
class VerifierPlaces:
    """The processes that score with ``reward.verifier.model``, each with a copy of it on a device of its own."""

    replicas: Positive = option(1, "Number of processes.")


@section()
class ScoringSection:
    """Processes that score."""

    verifier: VerifierPlaces | None = option(
        None,
        "Those of the verifier, which then needs reward.verifier.model: {replicas: 2}. None: it is in the driver, "
        "or behind servers.",
    )


@section()
class FailuresSection:
    """What happens when processes die or hang."""

    deadline: Annotated[float, Field(gt=0)] = option(
        900.0,
        "Seconds after which a call that has not been answered has failed.",
    )
    engine_replacements: Natural = option(20, "How often processes that sample are replaced in a run before it ends.")
    group_restarts: Natural = option(
        5,
        "How often the processes that train a group are started again in a run before it ends.",
    )
    snapshots: bool = option(
        True,
        "Keep a copy of weights and optimizers in main memory after every update, from which a group that died is "
        "built again. If not, the run ends when a process that trains dies.",
    )


@section()
class ClusterSection:
    """Where a run samples and learns.

    Raises:
        ValueError: ``variables`` are given for a cluster that is joined.
    """

    backend: Literal["local", "ray", "tinker"] = option(
        "local",
        "local: in the processes of the launcher. ray: in groups of processes that Ray starts (pip install -e "
        '".[ray]"), one for each base model, which learn at the same time. tinker: on a service that speaks the Tinker '
        'API (pip install -e ".[tinker]"), with no weights here (docs/howto/tinker.md).',
    )
    tinker: brought("maporl.integrations.tinker.section:TinkerSection") = option(  # type: ignore[valid-type]
        help="For backend: tinker: the service, and its prices.",
        factory=made("maporl.integrations.tinker.section:TinkerSection"),
    )
    address: str | None = option(None, "Address of a Ray cluster to join, or auto. None: start Ray on this machine.")
    devices: Literal["auto"] | CountedPlaces = option(
        "auto",
        "What processes are placed on. auto: the accelerators that Ray reports, or CPUs if it reports none; {cpu: "
        "4}: four places on CPUs, counted as if they were devices.",
    )
    pools: dict[str, PoolSection] = option(
        {},
        "Kinds of machines by name: {fast: {accelerator: H100}, cheap: {resource: cheap}}. learner.pool and "
        "engines.pool name them; by default a process may be on any machine.",
    )
    groups: dict[str, GroupSection] = option(
        {},
        "Groups of policies by name: {ann: {policies: [ann], learner: {devices: 2, strategy: fsdp2}}}. By default "
        "there is one for each base model.",
    )
    batching: Literal["steps", "flow"] = option(
        "steps",
        "steps: the dialogues of an update take their steps together; flow: each goes on as soon as its answers "
        "are there.",
    )
    on_update: Literal["finish", "drain"] = option(
        "finish",
        "What happens to dialogues in progress when weights change (training.async_depth). finish: answers that "
        "have begun end with the old weights, and the next ones have the new weights; drain: dialogues end first.",
    )
    scoring: ScoringSection = option(help="Processes that score.", factory=ScoringSection)
    failures: FailuresSection = option(help="What happens when processes die or hang.", factory=FailuresSection)
    variables: tuple[str, ...] = option(
        (),
        "Names of environment variables that the processes get besides those of the system and of the libraries "
        "that train and sample. Ray that is started here passes on no others, and so no keys.",
    )

    def __post_init__(self) -> None:
        if self.variables and (self.address is not None or self.backend != "ray"):
            why = (
                "the machines of a cluster that is joined have their own"
                if self.address
                else f"backend: {self.backend} starts no processes"
            )
            raise ValueError(f"variables: {why}; leave it out")
