"""The backend ``ray``: every group of policies in processes of its own, which Ray starts on this machine or on a cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maporl.backends.engine_pool import EnginePool
from maporl.backends.group import LearnerGroup
from maporl.backends.groups import groups_of
from maporl.backends.member import Member
from maporl.backends.ray_cluster import Cluster, RayMember
from maporl.backends.remote_engine import RemoteEngine
from maporl.backends.remote_learning import RemoteLearner, RemoteLearning
from maporl.backends.spec import GroupSpec
from maporl.backends.verifier_pool import VerifierPool
from maporl.config import Config
from maporl.config.cluster import GroupSection
from maporl.config.schema import RewardSection
from maporl.engines.base import Engine
from maporl.errors import ConfigError
from maporl.rewards.base import RewardSource
from maporl.rewards.verifier.source import ServedVerifier
from maporl.team.team import Team
from trl_ext.ppov2_config import PPOv2Config


class RayBackend:
    """Trains and samples in groups of processes (:mod:`maporl.backends`), which learn at the same time.

    The trainer starts it, and :meth:`end` ends all of its processes.

    Args:
        config: the run's configuration, whose section ``cluster`` says which groups there are.

    Raises:
        ConfigError: Ray is missing, or the groups do not fit the policies.
    """

    def __init__(self, config: Config):
        self.config, self.section = config, config.cluster
        self.groups: dict[str, GroupSection] = groups_of(config)
        self.cluster: Cluster | None = None
        self.learners: dict[str, LearnerGroup] = {}
        self.pools: dict[str, EnginePool] = {}
        self.verifier: VerifierPool | None = None
        self._on_device = False
        self._versions: dict[str, int] = {}

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
        cluster = self.cluster = Cluster(self.section.address)
        on_device = self._on_device = self._fits(cluster, learners)
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
            self.pools[name] = EnginePool(spec, self._starter("engine", spec, on_device), self.section.failures, folder)
            if trained:
                start = self._starter("learner", spec, on_device)
                self.learners[name] = LearnerGroup(spec, start, self.section.failures, folder)
        learning = RemoteLearning(dict(learners), list(self.learners.values()))
        learning.on_all(LearnerGroup.build)
        for pool in self.pools.values():
            pool.build()
        if self.verifier is not None:
            self.verifier.build()
        return learning

    def sources(self, reward: RewardSection) -> dict[str, RewardSource]:
        """Return the reward source that asks the verifier's processes, which :meth:`start` starts, if there are to be any."""
        places, section = self.section.scoring.verifier, reward.verifier
        if places is None or section is None:
            return {}
        spec = GroupSpec("scoring", self.config, (), (), 0, False, 1, 0, "replicated", places.replicas, None)

        def start(number: int) -> Member:
            return self._starter("verifier", spec, self._on_device)(number)

        folder = Path(self.config.output_dir)
        self.verifier = VerifierPool(section, places.replicas, start, self.section.failures.deadline, folder)
        return {"verifier": ServedVerifier(self.verifier, section.on_failure == "label")}

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
        if self.verifier is not None:
            self.verifier.end()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster = None

    def _starter(self, part: str, spec: GroupSpec, on_device: bool) -> Any:
        def start(number: int) -> RayMember:
            assert self.cluster is not None, "start() has made it"
            name = f"{spec.name} {part} {number}"
            log = Path(self.config.output_dir) / "logs" / f"{spec.name}-{part}-{number}.log"
            return self.cluster.start(name, part, spec, number, on_device, log)

        return start

    def _fits(self, cluster: Cluster, learners: Mapping[str, RemoteLearner]) -> bool:
        """Return whether every process gets an accelerator. Otherwise all are on CPUs.

        Raises:
            ConfigError: the cluster has accelerators, but fewer than the groups ask for.
        """
        found = cluster.devices()
        if self.config.training.use_cpu or not found:
            return False
        asked = {
            name: (group.learner.devices if any(p in learners for p in group.policies) else 0) + group.engines.replicas
            for name, group in self.groups.items()
        } | ({} if self.verifier is None else {"the verifier": self.verifier.replicas})
        if sum(asked.values()) > found:
            cluster.end()
            each = ", ".join(f"{name} {number}" for name, number in asked.items())
            raise ConfigError(
                f"cluster.groups: they ask for {sum(asked.values())} devices ({each}), and Ray has {found}; lower learner.devices or "
                "engines.replicas, put policies into one group, or set training.use_cpu"
            )
        return True
