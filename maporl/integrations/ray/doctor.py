"""What ``maporl doctor`` says of groups of processes: Ray here, and the machines of a cluster."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from maporl.errors import ConfigError
from maporl.integrations.ray.joining import SHARED_MEMORY, check_facts, facts_here, free_shared_memory
from maporl.integrations.ray.ray_cluster import OBJECT_STORE, Cluster, check_installed
from maporl.runs.doctor import Finding, version_of
from trl_ext.process.devices import accelerators


def examine_groups(what: str) -> list[Finding]:
    """Return whether policies can be in groups, and the devices and the memory that Ray has. Nothing is started.

    ``what`` is the name of the finding.
    """
    try:
        check_installed()
    except ConfigError as error:
        return [Finding(what, "missing", str(error).removeprefix("cluster.backend: "))]
    gpus = sum(device.type == "cuda" for device in accelerators())  # those that Ray counts
    memory = psutil.virtual_memory()
    each = "each process of a group can have its own" if gpus else "the processes of groups share the processor"
    told = (
        f"ray {version_of('ray')}; {gpus} GPUs: {each}; {memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} "
        "GiB free"
    )
    return [Finding(what, "fine", told), *_shared_memory(OBJECT_STORE, SHARED_MEMORY)]


def examine_cluster(address: str) -> list[Finding]:
    """Ask each machine of a Ray cluster what it is. Return its devices, and whether a run from here could use it.

    What each machine sees of a run's folder is asked when a run joins.
    """
    nowhere, what = Path(os.devnull), f"cluster {address}"
    try:
        cluster = Cluster(address)
        try:
            facts, devices = cluster.facts(nowhere), cluster.devices()
        finally:
            cluster.end()
    except (ConfigError, ConnectionError) as error:
        return [Finding(what, "missing", str(error).removeprefix("cluster: "))]
    here, findings = replace(facts_here(str(nowhere)), mark=""), []
    for name, (there, told) in facts.items():
        has = ", ".join(f"{count:g} {kind}" for kind, count in devices[name].items())
        if there.shared_memory is not None:
            has += f", {there.shared_memory / 2**30:.1f} GiB for Ray's objects"
        try:
            warned = check_facts(here, {name: (replace(there, mark=""), told)}, "", nowhere, 0)
        except ConfigError as error:
            findings.append(Finding(f"machine {name}", "missing", f"{has}; {error}"))
        else:
            state: Literal["fine", "missing"] = "missing" if warned else "fine"
            findings.append(Finding(f"machine {name}", state, "; ".join([has, *warned])))
    return findings


def _shared_memory(needed: int, folder: Path) -> list[Finding]:
    """Return whether ``folder``, the shared memory of Linux, has the bytes through which samples and weights go."""
    free_bytes = free_shared_memory(folder)
    if free_bytes is None:  # another system
        return []
    free, most = free_bytes / 2**30, needed / 2**30
    if free >= most:
        return [Finding("shared memory", "fine", f"{free:.1f} GiB free in {folder}; groups take up to {most:.0f}")]
    why = f"{free:.1f} GiB free in {folder}, and groups take up to {most:.0f}; Ray then uses the disk, which is slow"
    return [Finding("shared memory", "missing", f"{why}; give it more (of a container: docker run --shm-size=4g)")]
