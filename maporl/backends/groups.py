"""Which policies form a group: those that the configuration names, or by default those of each base model."""

from collections.abc import Mapping

from maporl.config import Config
from maporl.config.cluster import GroupSection
from maporl.errors import ConfigError
from maporl.team.loading import base_key, policy_names


def groups_of(config: Config) -> dict[str, GroupSection]:
    """Return the groups of a run by name.

    By default, there is one for each base model, with the name of its first policy. Policies that share a central critic
    are one group.

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


def trained_policies(config: Config) -> set[str]:
    """Return the names of the policies that are trained."""
    return {
        policy
        for name, section in config.agents.items()
        if section.weights and section.trainable
        for policy in policy_names(name, section, config)
    }


def _bases(config: Config) -> dict[str, tuple]:
    """Return by policy what policies of one group have in common by default."""
    bases: dict[str, tuple] = {}
    for name, section in config.agents.items():
        for policy in policy_names(name, section, config) if section.weights else ():
            shares = section.tiny is None and (section.lora or section.adapter)
            central = section.trainable and (section.critic or config.training.critic) == "central"
            key = base_key(section) if shares else (policy,)
            bases.setdefault(policy, ("central critic",) if central else key)
    return bases


def _check(groups: Mapping[str, GroupSection], bases: Mapping[str, tuple]) -> None:
    owner: dict[str, str] = {}
    for name, group in groups.items():
        for policy in group.policies:
            if policy not in bases:
                raise ConfigError(f"cluster.groups.{name}: no policy {policy!r}; the policies are {', '.join(bases)}")
            if policy in owner:
                raise ConfigError(
                    f"cluster.groups: policy {policy!r} is in {owner[policy]!r} and in {name!r}; leave it in one of them"
                )
            owner[policy] = name
    if missing := [policy for policy in bases if policy not in owner]:
        raise ConfigError(f"cluster.groups: policy {missing[0]!r} is in no group; add it to one")
    for policy, base in bases.items():
        for other, theirs in bases.items():
            if base == theirs and owner[policy] != owner[other]:
                why = "share a central critic" if base == ("central critic",) else "are adapters of one base"
                raise ConfigError(
                    f"cluster.groups: policies {policy!r} and {other!r} {why}, and are in {owner[policy]!r} and {owner[other]!r}; "
                    "put them into one group"
                )
