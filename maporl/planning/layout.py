"""A placement as the section ``cluster`` of a configuration that runs with the backend ``ray``. Imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from maporl.config import Config
from maporl.config.cluster import EnginePlaces, GroupSection, LearnerPlaces
from maporl.config.parse import to_yaml
from maporl.errors import ConfigError
from maporl.planning.devices import Cluster
from maporl.planning.placements import Group, Placement, apart


def runnable(
    config: Config, groups: Sequence[Group], cluster: Cluster, placements: Sequence[Placement]
) -> Placement | None:
    """Return the quickest placement with which ``config`` runs as it is, or None if none fits.

    It has the configuration's own ``async_depth``. Devices are shared only where vLLM samples from all groups and
    nobody plays ahead, because other engines do not give their memory back.

    Args:
        config: the configuration.
        groups: its groups.
        cluster: the devices.
        found: all placements of the plan.
    """
    depth = config.training.async_depth
    speaking = [agent for agent in config.agents.values() if agent.weights]
    sleeps = all(a.engine == "vllm" and a.vllm and a.vllm.colocate and a.vllm.colocate.sleep for a in speaking)
    shared = [one for one in placements if one.sharing != "apart"] if sleeps and not depth else []
    fitting = [one for one in (*apart(groups, cluster, [depth]), *shared) if not one.refused]
    return min(fitting, key=lambda one: one.period, default=None)


def with_layout(config: Config, groups: Sequence[Group], placed: Placement) -> Config:
    """Return ``config`` with the groups of a placement, for the backend ``ray``.

    Learners of several devices that train all weights are sharded (``fsdp2``). Adapters share a base, so that every
    device has the whole of it. The other keys of the section ``cluster`` stay.
    """
    sections = {}
    for group, share in zip(groups, placed.shares, strict=True):
        sharded = share.learner > 1 and not group.model.adapters
        sections[group.name] = GroupSection(
            list(group.policies or (group.name,)),
            LearnerPlaces(devices=max(share.learner, 1), strategy="fsdp2" if sharded else "replicated"),
            EnginePlaces(replicas=share.engines, rows=share.rows),
            placed.sharing,
        )
    return replace(config, cluster=replace(config.cluster, backend="ray", groups=sections))


def section_lines(config: Config, groups: Sequence[Group]) -> list[str]:
    """Return the section ``cluster`` as YAML: the backend and the groups.

    A group that does not learn has no learner.
    """
    shown = {}
    for group in groups:
        section = asdict(config.cluster.groups[group.name])
        shown[group.name] = section if group.trained else {key: section[key] for key in ("policies", "engines")}
    values = {"cluster": {"backend": "ray", "groups": shown}}
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120).splitlines()


def write_layout(config: Config, file: Path) -> None:
    """Write a whole configuration into a new file.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as out:
            out.write(to_yaml(config))
    except FileExistsError:
        raise ConfigError(f"--write {file}: is there already; name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"--write {file}: cannot be written ({error.strerror}); name another file") from None
