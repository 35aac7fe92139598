"""The backend ``ray``: every group of policies in processes of its own, which Ray starts on this machine or on a cluster."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maporl.backends.engine_pool import EnginePool
from maporl.backends.group import LearnerGroup
from maporl.backends.groups import groups_of
from maporl.backends.ray_cluster import Cluster, RayMember, check_installed
from maporl.backends.refusals import check_distributed
from maporl.backends.remote_engine import RemoteEngine
from maporl.backends.remote_learning import RemoteLearner, RemoteLearning
from maporl.backends.remote_weights import RemotePast, RemoteUntrained
from maporl.backends.spec import GroupSpec, without_devices
from maporl.config import Config
from maporl.config.cluster import ClusterSection, GroupSection
from maporl.engines.base import Engine
from maporl.errors import ConfigError
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.team.past_policies import PastPolicies, past_name
from maporl.team.team import Team
from trl_ext.losses import OBJECTIVES
from trl_ext.ppov2_config import PPOv2Config


class RayBackend:
    """Trains and samples in groups of processes, which Ray starts and which learn at the same time.

    ::

        trainer = MultiAgentPPOTrainer(args, team, task, backend=RayBackend())
        trainer.train()

    The trainer starts the processes, and they end with its run. In a block ``with RayBackend() as backend:`` they stay
    until the end of the block, so that you can evaluate after training. Another trainer with the same backend then takes
    their place, on the same Ray.

    The processes load the team's weights, and this process holds none: the models of the team are empty afterwards. The
    trained team is in the run's folder (:meth:`maporl.Team.from_pretrained`).

    Args:
        cluster: the section ``cluster`` of a configuration: the groups, the address of a cluster to join, how dialogues are
            batched, and what happens when processes die. By default every base model is a group, on this machine.

    Raises:
        ConfigError: Ray is missing or too old, or ``cluster`` asks for another backend.
    """

    def __init__(self, cluster: ClusterSection | None = None):
        self.section = cluster or ClusterSection(backend="ray")
        if self.section.backend != "ray":
            raise ConfigError(
                f"RayBackend: cluster.backend is {self.section.backend!r}; pass ClusterSection(backend='ray', ...), or no backend"
            )
        check_installed()
        self.cluster: Cluster | None = None
        self.groups: dict[str, GroupSection] = {}
        self.learners: dict[str, LearnerGroup] = {}
        self.pools: dict[str, EnginePool] = {}
        self._versions: dict[str, int] = {}
        self._kept = False
        self._owner: dict[str, str] = {}
        """The group of each policy."""
        self._past: dict[str, str] = {}
        """For each policy that speaks with past weights, the name of the one that had them."""
        self._sent: dict[str, Any] = {}
        """A handle of the weights that each policy has sent last."""
        self._told: dict[str, Any] = {}
        """What all groups are told, by the names of :class:`maporl.backends.spec.GroupSpec`."""

    def __enter__(self) -> "RayBackend":
        self._kept = True
        return self

    def __exit__(self, *error: object) -> None:
        self._kept = False
        self.end()

    def past_policies(self, section: OpponentPool, team: Team, seed: int) -> PastPolicies:
        """Return the past opponents of a run, whose weights stay in the processes."""
        return RemotePast(section, team, seed, self)

    def untrained(self, team: Team) -> UntrainedWeights:
        """Return the weights that the policies of ``team`` started from, which the processes hold."""
        return RemoteUntrained(team, self)

    def describe(self, config: Config, team: Team, args: PPOv2Config, critics: bool) -> dict[str, RemoteLearner]:
        """Return what the driver knows of each learner of ``team``, whose models have no weights here.

        Args:
            config: describes the team, which the processes load.
            team: the team.
            args: the trainer's arguments.
            critics: whether policies have critics.

        Raises:
            ConfigError: the groups do not fit the policies, or something does not work with groups.
            ValueError: no policy is trainable.
        """
        config = replace(config, cluster=self.section)
        check_distributed(config)
        self.groups = groups_of(config)
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
        stops = {
            name: (policy.stop_ids, () if policy.stop_strings is None else policy.stop_strings.strings)
            for name, policy in team.policies.items()
        }
        self._told = {"config": config, "args": args, "stops": stops, "seed": torch.initial_seed()}
        self._owner = {policy: name for name, group in self.groups.items() for policy in group.policies}
        self._past = {past_name(policy): policy for policy in self._owner if past_name(policy) in team.policies}
        self._owner |= {past: self._owner[policy] for past, policy in self._past.items()}
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
        self._end_groups()
        self.pools, self.learners, self._versions, self._sent = {}, {}, {}, {}
        cluster = self.cluster = self.cluster or Cluster(self.section.address)
        on_device = self._fits(cluster, learners)
        told = self._told | {
            "args": without_devices(self._told["args"]),
            "objective": OBJECTIVES[self._told["args"].objective],
        }
        for name, group in self.groups.items():
            trained = tuple(policy for policy in group.policies if policy in learners)
            spec = GroupSpec(
                name=name,
                policies=tuple(group.policies),
                trained=trained,
                updates=updates,
                critics=critics,
                outputs=outputs,
                devices=group.learner.devices,
                strategy=group.learner.strategy,
                replicas=group.engines.replicas,
                rows=group.engines.rows,
                past={past: policy for past, policy in self._past.items() if policy in group.policies},
                **told,
            )
            failures, folder = self.section.failures, self.folder
            self.pools[name] = EnginePool(spec, self._starter("engine", spec, on_device), failures, folder)
            if trained:
                self.learners[name] = LearnerGroup(spec, self._starter("learner", spec, on_device), failures, folder)
        learning = RemoteLearning(dict(learners), list(self.learners.values()))
        learning.on_all(LearnerGroup.build)
        for pool in self.pools.values():
            pool.build()
        return learning

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self._told["config"].output_dir)

    def engine(self, team: Team, args: PPOv2Config) -> Engine:
        """Return the engine that samples in the groups' processes, after :meth:`start`."""
        pools = {policy: self.pools[name] for policy, name in self._owner.items()}
        flows = self.section.batching == "flow"
        return RemoteEngine(team.policies, pools, args.response_length, self.send, flows)

    def send(self, policy: str) -> None:
        """Send the present weights of a trained policy from the processes that train it to those that sample from it."""
        if self._trains(policy):
            self._sent[policy] = self.group_of(policy).kept("weights", policy)
            self.give(policy, self._sent[policy])

    def give(self, policy: str, weights: Any) -> None:
        """Let a policy speak with ``weights``, a handle, from now on."""
        self._versions[policy] = self._versions.get(policy, 0) + 1
        self.pools[self._owner[policy]].load(policy, self._versions[policy], weights)

    def last_sent(self, policy: str) -> Any:
        """Return a handle of the weights that a trained policy has sent last."""
        return self._sent[policy]

    def group_of(self, policy: str) -> LearnerGroup:
        """Return the group that trains ``policy``."""
        return self.learners[self._owner[policy]]

    def ask_untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights` in the group of a policy.

        A trained policy's first weights are the reference of those that train it, and others do not change.
        """
        if self._trains(policy):
            return self.group_of(policy).all("untrained", method, policy, *arguments)[0]
        return self.pools[self._owner[policy]].call("untrained", method, policy, *arguments)

    def _trains(self, policy: str) -> bool:
        name = self._owner[policy]
        return name in self.learners and policy in self.learners[name].spec.trained

    def run_ended(self) -> None:
        """End all processes, unless this is in a block ``with backend:``."""
        if not self._kept:
            self.end()

    def end(self) -> None:
        """End all processes. A cluster that was joined goes on without them."""
        self._end_groups()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster = None

    def _end_groups(self) -> None:
        for pool in self.pools.values():
            pool.end()
        for group in self.learners.values():
            group.end()

    def _starter(self, part: str, spec: GroupSpec, on_device: bool) -> Any:
        def start(number: int) -> RayMember:
            assert self.cluster is not None, "start() has made it"
            name = f"{spec.name} {part} {number}"
            log = self.folder / "logs" / f"{spec.name}-{part}-{number}.log"
            return self.cluster.start(name, part, spec, number, on_device, log)

        return start

    def _fits(self, cluster: Cluster, learners: Mapping[str, RemoteLearner]) -> bool:
        """Return whether every process gets an accelerator. Otherwise all are on CPUs.

        Raises:
            ConfigError: the cluster has accelerators, but fewer than the groups ask for.
        """
        found = cluster.devices()
        if self._told["args"].use_cpu or not found:
            return False
        asked = {
            name: (group.learner.devices if any(p in learners for p in group.policies) else 0) + group.engines.replicas
            for name, group in self.groups.items()
        }
        if sum(asked.values()) > found:
            each = ", ".join(f"{name} {number}" for name, number in asked.items())
            raise ConfigError(
                f"cluster.groups: they ask for {sum(asked.values())} devices ({each}), and Ray has {found}; lower learner.devices or "
                "engines.replicas, put policies into one group, or set training.use_cpu"
            )
        return True
