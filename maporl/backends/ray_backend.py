"""The backend ``ray``: every group of policies in processes of its own, which Ray starts on this machine or on a cluster."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from maporl.backends.engine_pool import EnginePool
from maporl.backends.group import LearnerGroup
from maporl.backends.groups import groups_of
from maporl.backends.joining import check_facts, check_shared_memory, facts_here, free_shared_memory, marked
from maporl.backends.member import Member
from maporl.backends.places import Part, plan_of
from maporl.backends.ray_cluster import OBJECT_STORE, Cluster
from maporl.backends.ray_places import Places, kind_of
from maporl.backends.remote_engine import RemoteEngine
from maporl.backends.remote_learning import RemoteLearner, RemoteLearning
from maporl.backends.spec import GroupSpec
from maporl.backends.turns import Turns
from maporl.backends.weights import sent_parameters
from maporl.config import Config
from maporl.config.cluster import GroupSection
from maporl.engines.base import Engine
from maporl.errors import ConfigError
from maporl.team.team import Team
from trl_ext.ppov2_config import PPOv2Config

logger = logging.getLogger(__name__)


class RayBackend:
    """Trains and samples in groups of processes (:mod:`maporl.backends`), which learn at the same time.

    The trainer starts it, and :meth:`end` ends all of its processes.

    Args:
        config: the run's configuration, whose section ``cluster`` says which groups there are.

    Raises:
        ConfigError: Ray is missing, or the groups do not fit the policies.
    """

    def __init__(self, config: Config):
        # processes may be in other folders
        self.config = replace(config, output_dir=str(Path(config.output_dir).absolute()))
        self.section = config.cluster
        self.groups: dict[str, GroupSection] = groups_of(config)
        self.cluster: Cluster | None = None
        self.places: Places | None = None
        self.learners: dict[str, LearnerGroup] = {}
        self.pools: dict[str, EnginePool] = {}
        self._versions: dict[str, int] = {}
        self._sent: dict[str, list[nn.Parameter]] = {}
        """What is sent of each trained policy to processes that sample, without weights."""

    def describe(self, team: Team, args: PPOv2Config, critics: bool) -> dict[str, RemoteLearner]:
        """Return what the driver knows of each learner of ``team``, whose models have no weights here.

        Raises:
            ValueError: no policy is trainable.
        """
        found = {
            name: RemoteLearner(
                name,
                policy.tokenizer,
                (policy.critic or args.critic) if critics else "none",
                args.learning_rate if policy.learning_rate is None else policy.learning_rate,
            )
            for name, policy in team.policies.items()
            if policy.trainable
        }
        self._sent = {name: list(sent_parameters(team.policies[name]).values()) for name in found}
        if not found:
            raise ValueError("no policy of the team is trainable; set trainable=True for at least one agent")
        return found

    def start(self, learners: Mapping[str, RemoteLearner], updates: int, critics: bool, outputs: int) -> RemoteLearning:
        """Start Ray and the processes that train. All groups load their models at the same time.

        Args:
            learners: the policies that are trained.
            updates: the number of updates of the run.
            critics: whether policies have critics.
            outputs: the number of outputs of each critic.

        Raises:
            ConfigError: the cluster has too few devices, or a model cannot be loaded.
            GroupFailed: processes died too often.
        """
        folder = Path(self.config.output_dir)
        cluster = self.cluster = self._cluster()
        try:
            self.places = self._place(cluster, learners)
        except ConfigError:
            self.end()
            raise
        turns = Turns()
        for name, group in self.groups.items():
            trained = tuple(policy for policy in group.policies if policy in learners)
            spec = GroupSpec(
                name,
                self.config,
                tuple(group.policies),
                trained,
                updates,
                critics,
                outputs,
                group.learner.devices,
                group.learner.strategy,
                group.engines.replicas,
                group.engines.rows,
            )
            failures = self.section.failures
            self.pools[name] = EnginePool(spec, self._starter("engine", spec), failures, folder, turns)
            if trained:
                self.learners[name] = LearnerGroup(spec, self._starter("learner", spec), failures, folder, turns)
        learning = RemoteLearning(dict(learners), list(self.learners.values()))
        learning.on_all(LearnerGroup.build)
        for pool in self.pools.values():
            pool.build()
        return learning

    def engine(self, team: Team, args: PPOv2Config) -> Engine:
        """Return the engine that samples in the groups' processes, after :meth:`start`."""
        pools = {policy: self.pools[name] for name, group in self.groups.items() for policy in group.policies}
        flows = self.section.batching == "flow"
        return RemoteEngine(team.policies, pools, args.response_length, self.send, flows)

    def send(self, policy: str) -> None:
        """Send the present weights of a trained policy from the processes that train it to those that sample from it."""
        name = next(name for name, group in self.groups.items() if policy in group.policies)
        if name not in self.learners or policy not in self.learners[name].spec.trained:
            return
        self._versions[policy] = self._versions.get(policy, 0) + 1
        self.pools[name].load(policy, self._versions[policy], self.learners[name].weights(policy))

    def end(self) -> None:
        """End all processes. A cluster that was joined goes on without them."""
        for pool in self.pools.values():
            pool.end()
        for group in self.learners.values():
            group.end()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster = None

    def _starter(self, part: Part, spec: GroupSpec) -> Callable[..., Member]:
        def start(number: int, place: int | None = None) -> Member:
            assert self.cluster is not None and self.places is not None, "start() has made them"
            own = self.places.plan.places[spec.name, part][number if place is None else place]
            return self.cluster.start(f"{spec.name} {part} {number}", part, spec, number, self.places, own)

        return start

    def _cluster(self) -> Cluster:
        """Start Ray here, or join a cluster.

        Raises:
            ConfigError: it cannot be joined, or this machine's shared memory is too small.
        """
        if self.section.address is not None:
            return Cluster(self.section.address)
        sent = [own for parameters in self._sent.values() for own in parameters]
        # of each policy the present weights and the next ones, and of each snapshot weights and two moments in float32
        asked = max(OBJECT_STORE, 2 * sum(own.nbytes + 12 * own.numel() for own in sent))
        free = free_shared_memory()
        memory = asked if free is None else min(asked, free)
        check_shared_memory(memory, self._largest(), "cluster: this machine")
        counted = self.section.devices
        return Cluster(memory=memory, places=0 if counted == "auto" else counted.cpu)

    def _largest(self) -> int:
        """Return the bytes of the largest weights that are sent."""
        return max(sum(own.nbytes for own in parameters) for parameters in self._sent.values())

    def _place(self, cluster: Cluster, learners: Collection[str]) -> Places:
        """Check the machines of the cluster, and reserve a device for each process.

        Raises:
            ConfigError: the cluster has too few, or a machine does not fit the others.
        """
        folder = Path(self.config.output_dir)
        if not cluster.own:
            with marked(folder) as mark:
                facts = cluster.facts(folder)
                for warning in check_facts(facts_here(str(folder)), facts, mark, folder, self._largest()):
                    logger.warning(warning)
        kind = kind_of(self.section.devices, self.config.training.use_cpu, cluster.ray.cluster_resources())
        places = Places(cluster.ray, plan_of(self.groups, learners), self.section.pools, kind)
        places.take()
        return places
