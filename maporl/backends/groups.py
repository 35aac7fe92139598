"""Which policies form a group: those that the configuration names, or by default those of each base model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from maporl.config import Config
from maporl.config.cluster import GroupSection
from maporl.config.schema import AgentSection, ColocateSection, VLLMSection
from maporl.errors import Fault
from maporl.protocols import policy_names
from maporl.team.loading import base_key

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
            yield Fault(
                key,
                f"policies {first!r} and {policy!r} {why}, and are in {owner[first]!r} and {owner[policy]!r}",
                "put them into one group",
            )


def _vllm(name: str, group: GroupSection, speakers: Mapping[str, AgentSection]) -> Iterator[Fault]:
    """Yield why vLLM cannot sample for a group some of whose policies use it."""
    sections = _in_vllm(group, speakers)
    if sections and (other := [policy for policy in group.policies if policy not in sections]):
        yield Fault(
            f"cluster.groups.{name}",
            f"vLLM samples from {next(iter(sections))!r} and transformers from {other[0]!r}",
            "give their agents the same engine, or put them into groups of their own",
        )
    for policy, section in sections.items():
        if section.colocate is None:
            yield Fault(
                f"policy {policy!r}",
                "vllm.urls are servers, and a group has a vLLM in each process that samples",
                "give vllm: {colocate: {}}, or use cluster.backend: local",
            )
        elif group.sharing == "sleep" and not section.colocate.sleep:
            yield Fault(
                f"cluster.groups.{name}.sharing",
                f"sleep needs vllm.colocate.sleep: true for {policy!r}",
                "set it, or use apart",
            )


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
    for policy, section in _speakers(config).items():
        shares = section.tiny is None and (section.lora or section.adapter)
        central = section.trainable and config.critic_of(section) == "central"
        bases[policy] = ("central critic",) if central else base_key(section) if shares else (policy,)
    return bases
