"""Which policies form a group: those that the configuration names, or by default those of each base model."""

from collections.abc import Mapping
from dataclasses import replace

from maporl.config import Config
from maporl.config.cluster import GroupSection
from maporl.config.schema import AgentSection, ColocateSection, VLLMSection
from maporl.errors import ConfigError
from maporl.protocols import policy_names
from maporl.team.loading import base_key

ALONE = 0.85
"""The share of a device's memory that vLLM takes where nothing else is."""


def groups_of(config: Config) -> dict[str, GroupSection]:
    """Return the groups of a run by name.

    By default, there is one for each base model, with the name of its first policy. Policies that share a central
    critic are one group.

    Raises:
        ConfigError: a policy is in no group or in two, or is unknown; or adapters of one base are in two groups.
    """
    bases = _bases(config)
    if not config.cluster.groups:
        members: dict[tuple, list[str]] = {}
        for policy, base in bases.items():
            members.setdefault(base, []).append(policy)
        return {names[0]: GroupSection(policies=names) for names in members.values()}
    _check(config.cluster.groups, bases)
    return dict(config.cluster.groups)


def vllm_of(config: Config, groups: Mapping[str, GroupSection]) -> dict[str, dict[str, VLLMSection]]:
    """Return the options of vLLM of each policy, by the group, for the groups that vLLM samples from.

    Agents that share a policy use the options of the first of them. A vLLM on a device of its own takes most of its
    memory, and does not sleep.

    Raises:
        ConfigError: some policies of a group use vLLM and others do not, or one uses servers, or vLLM is to sleep and
            may not.
    """
    speakers = _speakers(config)
    options: dict[str, dict[str, VLLMSection]] = {}
    for name, group in groups.items():
        sections = {p: s.vllm for p in group.policies if (s := speakers[p]).engine == "vllm" and s.vllm is not None}
        if sections and (other := [policy for policy in group.policies if policy not in sections]):
            raise ConfigError(
                f"cluster.groups.{name}: vLLM samples from {next(iter(sections))!r} and transformers from "
                f"{other[0]!r}; give their agents the same engine, or put them into groups of their own"
            )
        if sections:
            options[name] = {p: replace(s, colocate=_here(name, group, p, s)) for p, s in sections.items()}
    return options


def _here(name: str, group: GroupSection, policy: str, section: VLLMSection) -> ColocateSection:
    """Return the options of a vLLM in the processes that sample for group ``name``."""
    here, alone = section.colocate, group.sharing == "apart"
    if here is None:
        raise ConfigError(
            f"policy {policy!r}: vllm.urls are servers, and a group has a vLLM in each process that samples; give "
            "vllm: {colocate: {}}, or use cluster.backend: local"
        )
    if group.sharing == "sleep" and not here.sleep:
        raise ConfigError(
            f"cluster.groups.{name}.sharing: sleep needs vllm.colocate.sleep: true for {policy!r}; set it, or use apart"
        )
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
        central = section.trainable and (section.critic or config.training.critic) == "central"
        bases[policy] = ("central critic",) if central else base_key(section) if shares else (policy,)
    return bases


def _check(groups: Mapping[str, GroupSection], bases: Mapping[str, tuple]) -> None:
    owner: dict[str, str] = {}
    for name, group in groups.items():
        for policy in group.policies:
            if policy not in bases:
                raise ConfigError(f"cluster.groups.{name}: no policy {policy!r}; the policies are {', '.join(bases)}")
            if policy in owner:
                raise ConfigError(
                    f"cluster.groups: policy {policy!r} is in {owner[policy]!r} and in {name!r}; leave it in one of "
                    "them"
                )
            owner[policy] = name
    if missing := [policy for policy in bases if policy not in owner]:
        raise ConfigError(f"cluster.groups: policy {missing[0]!r} is in no group; add it to one")
    for policy, base in bases.items():
        for other, theirs in bases.items():
            if base == theirs and owner[policy] != owner[other]:
                why = "share a central critic" if base == ("central critic",) else "are adapters of one base"
                raise ConfigError(
                    f"cluster.groups: policies {policy!r} and {other!r} {why}, and are in {owner[policy]!r} and "
                    f"{owner[other]!r}; put them into one group"
                )
