"""Which policies form a group, and where its processes are: a plan of devices, and how it is laid over machines.

A configuration names the groups. By default, the policies of each base model are one. Nothing here imports Ray.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from maporl.config import Config
from maporl.config.schema import AgentSection
from maporl.errors import ConfigError, Fault
from maporl.integrations.ray.section import ClusterSection, GroupSection, PoolSection
from maporl.integrations.vllm.section import ColocateSection, VLLMSection
from maporl.protocols import policy_names
from maporl.team.loading import base_key

# -- groups ------------------------------------------------------------------------------------------------------------

ALONE = 0.85
"""The share of a device's memory that vLLM takes where nothing else is."""


def groups_of(config: Config) -> dict[str, GroupSection]:
    """Return the groups of a run by name.

    By default, there is one for each base model, with the name of its first policy. Policies that share a central
    critic are one group.
    """
    if config.cluster.groups:
        return dict(config.cluster.groups)
    members: dict[tuple, list[str]] = {}
    for policy, base in _bases(config).items():
        members.setdefault(base, []).append(policy)
    return {names[0]: GroupSection(policies=names) for names in members.values()}


def group_faults(config: Config) -> Iterator[Fault]:
    """Yield policies that are unknown, in no group or in two; policies that belong into one group; and groups in which
    vLLM cannot sample."""
    groups, bases = groups_of(config), _bases(config)
    unknown = [(name, policy) for name, group in groups.items() for policy in group.policies if policy not in bases]
    for name, policy in unknown:
        yield Fault(f"cluster.groups.{name}", f"no policy {policy!r}", f"the policies are {', '.join(bases)}")
    yield from _misplaced(groups, bases)
    if not unknown:
        for name, group in groups.items():
            yield from _vllm(name, group, _speakers(config))


def _misplaced(groups: Mapping[str, GroupSection], bases: Mapping[str, tuple]) -> Iterator[Fault]:
    key, owner = "cluster.groups", dict[str, str]()
    for name, group in groups.items():
        for policy in group.policies:
            if policy in owner:
                what = f"policy {policy!r} is in {owner[policy]!r} and in {name!r}"
                yield Fault(key, what, "leave it in one of them")
            owner.setdefault(policy, name)
    for policy, base in bases.items():
        if policy not in owner:
            yield Fault(key, f"policy {policy!r} is in no group", "add it to one")
        first = next(other for other, theirs in bases.items() if theirs == base)
        if {policy, first} <= owner.keys() and owner[policy] != owner[first]:
            why = "share a central critic" if base == ("central critic",) else "are adapters of one base"
            what = f"policies {first!r} and {policy!r} {why}, and are in {owner[first]!r} and {owner[policy]!r}"
            yield Fault(key, what, "put them into one group")


def _vllm(name: str, group: GroupSection, speakers: Mapping[str, AgentSection]) -> Iterator[Fault]:
    """Yield why vLLM cannot sample for a group some of whose policies use it."""
    sections = _in_vllm(group, speakers)
    if sections and (other := [policy for policy in group.policies if policy not in sections]):
        what = f"vLLM samples from {next(iter(sections))!r} and transformers from {other[0]!r}"
        remedy = "give their agents the same engine, or put them into groups of their own"
        yield Fault(f"cluster.groups.{name}", what, remedy)
    for policy, section in sections.items():
        if section.colocate is None:
            what = "vllm.urls are servers, and a group has a vLLM in each process that samples"
            yield Fault(f"policy {policy!r}", what, "give vllm: {colocate: {}}, or use cluster.backend: local")
        elif group.sharing == "sleep" and not section.colocate.sleep:
            what = f"sleep needs vllm.colocate.sleep: true for {policy!r}"
            yield Fault(f"cluster.groups.{name}.sharing", what, "set it, or use apart")


def vllm_of(config: Config, groups: Mapping[str, GroupSection]) -> dict[str, dict[str, VLLMSection]]:
    """Return the options of vLLM of each policy, by the group, for the groups that vLLM samples from.

    Agents that share a policy use the options of the first of them. A vLLM on a device of its own takes most of its
    memory, and does not sleep.
    """
    speakers = _speakers(config)
    sections = {name: _in_vllm(group, speakers) for name, group in groups.items()}
    return {
        name: {policy: replace(section, colocate=_here(groups[name], section)) for policy, section in some.items()}
        for name, some in sections.items()
        if some
    }


def _in_vllm(group: GroupSection, speakers: Mapping[str, AgentSection]) -> dict[str, VLLMSection]:
    """Return the options of vLLM of the policies of a group that use it."""
    sections = {policy: speakers[policy] for policy in group.policies}
    return {p: section.vllm for p, section in sections.items() if section.engine == "vllm" and section.vllm is not None}


def _here(group: GroupSection, section: VLLMSection) -> ColocateSection:
    """Return the options of a vLLM in the processes that sample for a group."""
    here, alone = section.colocate, group.sharing == "apart"
    assert here is not None, "group_faults() names it"
    share = here.gpu_memory_utilization or (ALONE if alone else None)
    return replace(here, sleep=here.sleep and not alone, gpu_memory_utilization=share)


def trained_policies(config: Config) -> set[str]:
    """Return the names of the policies that are trained."""
    return {
        policy
        for name, section in config.agents.items()
        if section.weights and section.trainable
        for policy in policy_names(name, section, config)
    }


def _speakers(config: Config) -> dict[str, AgentSection]:
    """Return the section of the first agent that each policy speaks for."""
    speakers: dict[str, AgentSection] = {}
    for name, section in config.agents.items():
        for policy in policy_names(name, section, config) if section.weights else ():
            speakers.setdefault(policy, section)
    return speakers


def _bases(config: Config) -> dict[str, tuple]:
    """Return by policy what policies of one group have in common by default."""
    bases: dict[str, tuple] = {}
    for name, section in config.agents.items():
        shares = section.tiny is None and (section.lora or section.adapter)
        central = section.trainable and config.of(name).training.critic == "central"
        for policy in policy_names(name, section, config) if section.weights else ():
            together = ("central critic",) if central else base_key(section) if shares else (policy,)
            bases.setdefault(policy, together)
    return bases


# -- a plan of devices -------------------------------------------------------------------------------------------------

Part = str
"""``learner``, ``engine`` or ``verifier``."""
SCORING = "scoring"
"""What processes that score have in the place of a group's name."""


@dataclass(frozen=True)
class Block:
    """Devices that are reserved together.

    Args:
        owner: who works there, as errors call it, such as ``ann to train``.
        devices: the number of devices.
        pool: the name of the pool whose machines have them. None: any machine.
        one: whether they are on one machine.
    """

    owner: str
    devices: int
    pool: str | None = None
    one: bool = False


@dataclass(frozen=True)
class Place:
    """Device number ``device`` of block number ``block`` of a plan."""

    block: int
    device: int


@dataclass(frozen=True)
class Machine:
    """A machine, as Ray reports it.

    Args:
        id: what Ray knows it by.
        name: its address.
        devices: the number of its devices, or of those that are free.
        resources: the names of all of its resources.
    """

    id: str
    name: str
    devices: int
    resources: frozenset[str] = frozenset()


@dataclass
class Plan:
    """The devices of a run, and which process is on which.

    Args:
        blocks: the devices.
        places: the places of each group's processes, by its name and part: of process 0, 1, and so on.
    """

    blocks: list[Block] = field(default_factory=list)
    places: dict[tuple[str, Part], list[Place]] = field(default_factory=dict)

    def sharers(self, place: Place) -> int:
        """Return how many processes are on a device."""
        return sum(other == place for places in self.places.values() for other in places)

    def said(self, blocks: Collection[Block] | None = None) -> str:
        """Return who asks for how many devices."""
        return ", ".join(f"{block.owner} {block.devices}" for block in (self.blocks if blocks is None else blocks))

    def add(self, block: Block) -> list[Place]:
        """Add a block, and return the places of its devices."""
        self.blocks.append(block)
        return [Place(len(self.blocks) - 1, device) for device in range(block.devices)]


def plan_of(groups: Mapping[str, GroupSection], trained: Collection[str], verifiers: int = 0) -> Plan:
    """Return the devices that groups ask for.

    A group that takes turns shares devices with all others of its pool that do: as many as the one with the most
    processes of a kind has. The learner and the engines of a group whose engines sleep share devices with each other.
    Each process of any other group has a device of its own.

    Args:
        groups: the groups by name.
        trained: the policies that are trained. A group without any has no processes that train.
        verifiers: the number of processes that score with the verifier.
    """
    plan = Plan()
    if verifiers:
        plan.places[SCORING, "verifier"] = [plan.add(Block("the verifier", 1))[0] for _ in range(verifiers)]
    turns: dict[str | None, dict[str, GroupSection]] = {}
    for name, group in groups.items():
        learns = not set(group.policies).isdisjoint(trained)
        if group.sharing == "turns":
            turns.setdefault(group.engines.pool, {})[name] = group
            continue
        if group.sharing == "sleep":
            _add_shared(plan, f"{name} to train and sample", group.engines.pool, {name: group}, trained)
            continue
        if learns:
            learner = group.learner
            block = Block(f"{name} to train", learner.devices, learner.pool, learner.node == "one")
            plan.places[name, "learner"] = plan.add(block)
        plan.places[name, "engine"] = [  # one block for each, so that each is replaced by itself
            plan.add(Block(f"{name} to sample", 1, group.engines.pool))[0] for _ in range(group.engines.replicas)
        ]
    for pool, sharers in turns.items():
        _add_shared(plan, f"{' and '.join(sharers)} in turns", pool, sharers, trained)
    return plan


def _add_shared(
    plan: Plan, owner: str, pool: str | None, groups: Mapping[str, GroupSection], trained: Collection[str]
) -> None:
    """Add the devices that ``groups`` share. The first ones are on one machine if a learner wants that."""
    learners = {n: g.learner for n, g in groups.items() if not set(g.policies).isdisjoint(trained)}
    together = max((learner.devices for learner in learners.values() if learner.node == "one"), default=0)
    count = max(
        [learner.devices for learner in learners.values()] + [group.engines.replicas for group in groups.values()]
    )
    places = plan.add(Block(owner, together, pool, one=True)) if together else []
    places += plan.add(Block(owner, count - together, pool)) if count > together else []
    engines = cycle(places)  # successive groups on successive devices, to sample at the same time where there is room
    for name, group in groups.items():
        if name in learners:
            plan.places[name, "learner"] = places[: group.learner.devices]
        plan.places[name, "engine"] = list(islice(engines, group.engines.replicas))


def place_faults(
    section: ClusterSection,
    groups: Mapping[str, GroupSection],
    trained: Collection[str],
    in_vllm: Collection[str],
    async_depth: int,
) -> Iterator[Fault]:
    """Yield what can be known to be wrong with places before Ray is asked.

    Args:
        section: the section ``cluster`` of the run.
        groups: the groups by name.
        trained: the policies that are trained.
        in_vllm: the groups that vLLM samples from.
        async_depth: ``training.async_depth``.
    """
    used = set()
    for name, group in groups.items():
        key = f"cluster.groups.{name}"
        if group.sharing == "sleep" and name not in in_vllm:
            what = "the engine transformers has no sleep"
            remedy = "use engine: vllm, or turns, in which the processes of a device work one at a time, or apart"
            yield Fault(f"{key}.sharing", what, remedy)
        if group.sharing == "sleep" and async_depth:
            what = "an engine that sleeps cannot play ahead"
            yield Fault(f"{key}.sharing", what, "set training.async_depth: 0, or apart")
        if group.sharing != "apart" and group.learner.pool != group.engines.pool:
            what = (
                f"sharing: {group.sharing} puts its processes on the same devices, and learner.pool is "
                f"{group.learner.pool!r} where engines.pool is {group.engines.pool!r}"
            )
            yield Fault(key, what, "give both the same pool")
        for part, pool in (("learner", group.learner.pool), ("engines", group.engines.pool)):
            if pool is not None and pool not in section.pools:
                pools = ", ".join(section.pools) or "none"
                yield Fault(f"{key}.{part}.pool", f"no pool {pool!r}; cluster.pools has: {pools}", "add it there")
            used.add(pool)
    for name in (name for name in section.pools if name not in used):
        yield Fault(f"cluster.pools.{name}", "no group uses it", "name it in learner.pool or engines.pool")
    plan = plan_of(groups, trained, 0 if section.scoring.verifier is None else section.scoring.verifier.replicas)
    asked = sum(block.devices for block in plan.blocks)
    if section.devices != "auto" and asked > section.devices.cpu:
        yield Fault(
            "cluster.groups",
            f"they ask for {asked} places ({plan.said()}), and cluster.devices has {section.devices.cpu}",
            f"set cluster.devices: {{cpu: {asked}}}, lower learner.devices or engines.replicas, or set sharing: turns",
        )


# -- machines ----------------------------------------------------------------------------------------------------------


def belongs(machine: Machine, pool: PoolSection | None) -> bool:
    """Return whether a machine is in a pool."""
    if pool is None:
        return True
    name = pool.resource if pool.accelerator is None else f"accelerator_type:{pool.accelerator}"
    return name in machine.resources


def lay(
    blocks: Sequence[Block], pools: Mapping[str, PoolSection], machines: Sequence[Machine]
) -> list[list[str]] | None:
    """Return the machine of each device of each block, by its ``id``. None if they do not fit.

    Blocks on one machine are laid first, the largest before the others, each on the fullest machine that it fits. If
    that leads to nothing, every other way is tried.
    """
    allowed = [[belongs(machine, pools.get(block.pool or "")) for machine in machines] for block in blocks]
    whole = sorted((n for n, b in enumerate(blocks) if b.one), key=lambda n: -blocks[n].devices)
    single = [n for n, block in enumerate(blocks) if not block.one for _ in range(block.devices)]
    free = [machine.devices for machine in machines]
    kinds = [tuple(row[m] for row in allowed) for m in range(len(machines))]
    hopeless: set[tuple] = set()

    def search(chosen: dict[int, int]) -> list[list[str]] | None:
        if len(chosen) == len(whole):
            spread = _spread([allowed[n] for n in single], free)
            if spread is None:
                return None
            ids = [[machines[chosen[n]].id] * block.devices if block.one else [] for n, block in enumerate(blocks)]
            for n, machine in zip(single, spread, strict=True):
                ids[n].append(machines[machine].id)
            return ids
        state = (len(chosen), *sorted(zip(free, kinds, strict=True)))
        if state in hopeless:
            return None
        block = whole[len(chosen)]
        size = blocks[block].devices
        for machine in sorted(range(len(machines)), key=lambda m: free[m]):
            if allowed[block][machine] and free[machine] >= size:
                free[machine] -= size
                laid = search(chosen | {block: machine})
                free[machine] += size
                if laid is not None:
                    return laid
        hopeless.add(state)
        return None

    return search({})


def _spread(singles: Sequence[Sequence[bool]], free: Sequence[int]) -> list[int] | None:
    """Give each single device a machine that it may be on, or return None if one stays without (augmenting paths)."""
    held: list[list[int]] = [[] for _ in free]

    def put(one: int, tried: set[int]) -> bool:
        # machines with room that are in use come first, so that successive devices are on few machines
        left = [count - len(ones) for count, ones in zip(free, held, strict=True)]
        for machine in sorted(range(len(free)), key=lambda m: (left[m] <= 0, not held[m], -left[m])):
            if not singles[one][machine] or machine in tried or not free[machine]:
                continue
            tried.add(machine)
            if len(held[machine]) < free[machine]:
                held[machine].append(one)
                return True
            for other in held[machine]:
                if put(other, tried):
                    held[machine].remove(other)
                    held[machine].append(one)
                    return True
        return False

    if not all(put(one, set()) for one in range(len(singles))):
        return None
    places = {one: machine for machine, ones in enumerate(held) for one in ones}
    return [places[one] for one in range(len(singles))]


def check_fits(plan: Plan, pools: Mapping[str, PoolSection], machines: Sequence[Machine]) -> None:
    """Check that a plan can be laid over machines.

    Raises:
        ConfigError: it cannot. The message has the sum, block by block, and what each machine has.
    """
    for name, pool in [(None, None), *pools.items()]:
        members = [machine for machine in machines if belongs(machine, pool)]
        blocks = [block for block in plan.blocks if name is None or block.pool == name]
        asked, there = sum(block.devices for block in blocks), sum(machine.devices for machine in members)
        if asked > there:
            where = "" if name is None else f" in pool {name} ({pool})"
            raise ConfigError(
                f"cluster.groups: they ask for {asked} devices{where} ({plan.said(blocks)}), and Ray has {there} "
                f"({_told(members)}); lower learner.devices or engines.replicas, let groups share with sharing: turns, "
                "or set training.use_cpu"
            )
        for block in blocks:
            if block.one and block.devices > max(machine.devices for machine in members):
                raise ConfigError(
                    f"cluster.groups: {block.owner} asks for {block.devices} devices on one machine (learner.node: "
                    f"one), and Ray has {_told(members)}; set learner.node: any, or lower learner.devices"
                )
    if lay(plan.blocks, pools, machines) is None:
        raise ConfigError(
            f"cluster.groups: they ask for {plan.said()}, which fits the machines one by one and not all together: Ray "
            f"has {_told(machines)}; set learner.node: any, or lower learner.devices"
        )


def _told(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{machine.name}: {machine.devices}" for machine in machines) or "no such machine"
