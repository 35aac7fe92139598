"""Devices that a run reserves from Ray: a placement group for each block of its plan, on the machines that the plan
says."""

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maporl.errors import ConfigError
from maporl.integrations.ray.groups import Block, Machine, Place, Plan, check_fits, lay
from maporl.integrations.ray.member import NoPlace
from maporl.integrations.ray.section import CountedPlaces, PoolSection
from trl_ext.process.waits import pause, until

logger = logging.getLogger(__name__)
PATIENCE = 15.0
"""The seconds in which devices that a plan needs become free, such as those of a process that has just been ended."""
COUNTED = "maporl_place"
"""The custom resource of places on CPUs."""


@dataclass(frozen=True)
class Kind:
    """What processes are placed on.

    Args:
        resource: its name in Ray.
        amount: how much of it is one device.
    """

    resource: str
    amount: float = 1.0


GPU, PLACE, CPU = Kind("GPU"), Kind(COUNTED), Kind("CPU", 0.001)
"""Accelerators; counted places on CPUs; and CPUs, which any number of processes share."""


def kind_of(devices: str | CountedPlaces, use_cpu: bool, resources: Mapping[str, float]) -> Kind:
    """Return what the processes of a run are placed on, where all of Ray's machines have ``resources`` together.

    Raises:
        ConfigError: there are fewer places on CPUs than the configuration says.
    """
    if isinstance(devices, CountedPlaces):
        places = int(resources.get(COUNTED, 0))
        if places < devices.cpu:
            raise ConfigError(
                f"cluster.devices: expected {devices.cpu} places on CPUs, and Ray has {places}; start its machines "
                "with: "
                f"ray start --resources='{{\"{COUNTED}\": N}}'"
            )
        return PLACE
    return CPU if use_cpu or not resources.get("GPU") else GPU


def node_name(node: Mapping[str, Any]) -> str:
    """Return what errors call a machine: its address, and the beginning of the number that Ray gave it."""
    return f"{node['NodeManagerAddress']} (node {node['NodeID'][:6]})"


class Places:
    """The devices of a run.

    Args:
        ray: the module.
        plan: who needs devices.
        pools: the pools by name.
        kind: what the processes are placed on.
    """

    def __init__(self, ray: Any, plan: Plan, pools: Mapping[str, PoolSection], kind: Kind):
        self.ray, self.plan, self.pools, self.kind = ray, plan, pools, kind
        self._lock = threading.Lock()
        self._groups: dict[int, Any] = {}
        self._machines: dict[int, list[str]] = {}
        """By the number of a block: its placement group, and the machine of each of its devices."""

    def take(self) -> None:
        """Reserve all devices.

        Raises:
            ConfigError: they do not fit the machines that there are, or others use them.
        """
        check_fits(self.plan, self.pools, self.machines(free=False))
        with self._lock:
            try:
                self._reserve(list(range(len(self.plan.blocks))))
            except NoPlace as error:
                raise ConfigError(f"cluster.groups: {error}; wait until others have ended, or ask for less") from None

    def give_back(self) -> None:
        """Give all devices back, so that others may reserve them."""
        with self._lock:
            for group in self._groups.values():
                self.ray.util.remove_placement_group(group)
            self._groups, self._machines = {}, {}

    def options(self, place: Place) -> dict[str, Any]:
        """Return the options of an actor in ``place``. A block of which a machine is lost is laid on other machines
        first.

        Raises:
            NoPlace: a machine is lost, and no other has free devices.
        """
        with self._lock:
            alive = {machine.id for machine in self.machines(free=False)}
            if not alive.issuperset(self._machines[place.block]):
                self.ray.util.remove_placement_group(self._groups[place.block])
                self._reserve([place.block])
                names = {machine.id: machine.name for machine in self.machines(free=False)}
                now = ", ".join(sorted({names[machine] for machine in self._machines[place.block]}))
                owner = self.plan.blocks[place.block].owner
                logger.warning("cluster: a machine is lost; the devices of %s are now on %s", owner, now)
            group = self._groups[place.block]
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=place.device
        )
        share = math.floor(10_000 / self.plan.sharers(place)) / 10_000  # Ray counts in ten thousandths
        asked: dict[str, Any] = {"num_cpus": 0, "num_gpus": share if self.kind == GPU else 0}
        if self.kind == PLACE:
            asked["resources"] = {COUNTED: share}
        return asked | {"scheduling_strategy": strategy}

    def machines(self, free: bool) -> list[Machine]:
        """Return the machines that are alive, with the number of all of their devices or of those that are ``free``."""
        # no public function tells what is free on each machine
        left = self.ray._private.state.available_resources_per_node() if free else {}
        machines = []
        for node in self.ray.nodes():
            if node["Alive"]:
                resources = left.get(node["NodeID"], {}) if free else node["Resources"]
                count = int(resources.get(self.kind.resource, 0) / self.kind.amount + 1e-6)
                machines.append(Machine(node["NodeID"], node_name(node), count, frozenset(node["Resources"])))
        return machines

    def _reserve(self, numbers: list[int]) -> None:
        """Make the placement groups of blocks, or raise NoPlace. The lock is held."""
        blocks = [self.plan.blocks[number] for number in numbers]
        end = time.monotonic() + PATIENCE
        while True:
            machines = self.machines(free=True)
            layout = lay(blocks, self.pools, machines)
            if layout is not None and self._made(numbers, blocks, layout):
                return
            if time.monotonic() > end:
                asked, there = (
                    self.plan.said(blocks),
                    ", ".join(f"{machine.name}: {machine.devices}" for machine in machines),
                )
                raise NoPlace(f"no machine has free devices for it: asked for {asked}; free: {there or 'nothing'}")
            pause(0.5)

    def _made(self, numbers: list[int], blocks: list[Block], machines: list[list[str]]) -> bool:
        """Make placement groups on the given machines, or none and return False if the devices are taken by now."""
        made = {}
        for number, block, where in zip(numbers, blocks, machines, strict=True):
            made[number] = self.ray.util.placement_group(
                [{self.kind.resource: self.kind.amount} for _ in where],
                strategy="STRICT_PACK" if block.one else "PACK",
                bundle_label_selector=[{"ray.io/node-id": machine} for machine in where],
            )
        if all(until(group.wait, PATIENCE) for group in made.values()):
            self._groups |= made
            self._machines |= dict(zip(numbers, machines, strict=True))
            return True
        for group in made.values():
            self.ray.util.remove_placement_group(group)
        return False
