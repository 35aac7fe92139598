"""The backend ``ray``: every group of policies in processes of its own, which Ray starts on this machine or on a
cluster."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maporl.config import Config
from maporl.config.schema import AgentSection
from maporl.engines.base import Engine
from maporl.engines.text import TextEngine
from maporl.errors import ConfigError, refuse
from maporl.integrations.ray.check import undistributed
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import LearnerGroup
from maporl.integrations.ray.groups import SCORING, Part, group_faults, groups_of, place_faults, plan_of, vllm_of
from maporl.integrations.ray.joining import check_facts, check_shared_memory, facts_here, free_shared_memory, marked
from maporl.integrations.ray.member import GroupSpec, Member, without_devices
from maporl.integrations.ray.messages import sent_parameters
from maporl.integrations.ray.ray_cluster import OBJECT_STORE, Cluster, check_installed
from maporl.integrations.ray.ray_places import Places
from maporl.integrations.ray.remote import RemoteEngine, RemoteLearner, RemoteLearning, RemotePast, RemoteUntrained
from maporl.integrations.ray.scheduling import Turns
from maporl.integrations.ray.section import ClusterSection, GroupSection
from maporl.integrations.ray.verifier_pool import VerifierPool
from maporl.integrations.vllm.section import VLLMSection
from maporl.protocols import policy_names
from maporl.rewards.base import RewardSource
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.team.loading import load_agents, load_tokenizers
from maporl.team.past_policies import PastPolicies, past_name
from maporl.team.team import Team
from maporl.text import printable
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.home import OWN_WEIGHTS, TeamHome
from maporl.training.parts import RunParts
from maporl.training.run_record import RunRecord
from maporl.verifier.source import ServedVerifier
from trl_ext.files import stacks
from trl_ext.learning.critics import CRITICS
from trl_ext.ppo.losses import OBJECTIVES
from trl_ext.ppo.options import rate_of
from trl_ext.process.messages import tell
from trl_ext.process.waits import Threads, result

ANSWER = 5.0
"""The seconds in which a process that trains must say that it is there, when a signal ends the run."""
logger = logging.getLogger(__name__)


class RayBackend(TeamHome):
    """Trains and samples in groups of processes, which Ray starts and which learn at the same time.

    ::

        trainer = MultiAgentPPOTrainer(args, team, task, backend=RayBackend())
        trainer.train()

    The trainer starts the processes, and they end with its run. In a block ``with RayBackend() as backend:`` they stay
    until the end of the block, so that you can evaluate after training. Another trainer with the same backend then
    takes their place, on the same Ray.

    The processes load the team's weights, and this process holds none: the models of the team are empty afterwards. The
    trained team is in the run's folder (:meth:`maporl.Team.from_pretrained`).

    Args:
        cluster: the section ``cluster`` of a configuration: the groups, the address of a cluster to join, how dialogues
            are batched, and what happens when processes die. By default every base model is a group, on this machine.
        quiet: whether to say nothing of what is started.

    Raises:
        ConfigError: Ray is missing or too old, or ``cluster`` asks for another backend.
    """

    def __init__(self, cluster: ClusterSection | None = None, quiet: bool = False):
        self.section, self._tell = cluster or ClusterSection(backend="ray"), _teller(quiet)
        if self.section.backend != "ray":
            raise ConfigError(
                f"RayBackend: cluster.backend is {self.section.backend!r}; pass ClusterSection(backend='ray', ...), or "
                "no backend"
            )
        check_installed()
        super().__init__({})
        self.cluster: Cluster | None = None
        self.places: Places | None = None
        self.groups: dict[str, GroupSection] = {}
        self._vllm: dict[str, dict[str, VLLMSection]] = {}
        """The options of vLLM of each policy, by the group that it samples from."""
        self.learner_groups: dict[str, LearnerGroup] = {}
        self.pools: dict[str, EnginePool] = {}
        self.verifier: VerifierPool | None = None
        self._kept = False
        self._owner: dict[str, str] = {}
        """The group of each policy."""
        self._past: dict[str, str] = {}
        """For each policy that speaks with past weights, the name of the one that had them."""
        self._handles: dict[str, Any] = {}
        """A handle of the weights that each policy has sent last."""
        self._versions: dict[str, int] = {}
        """How often each policy that is not trained was given weights."""
        self._reading, self._turns = tuple[str, ...](), 1
        self._record: RunRecord | None = None
        """What keeps the team's weights for the processes, if no configuration says where these are."""
        self._told: dict[str, Any] = {}
        """What all groups are told, by the names of :class:`maporl.integrations.ray.member.GroupSpec`."""
        self._sent: dict[str, list[nn.Parameter]] = {}
        """What is sent of each trained policy to processes that sample, without weights."""
        stacks.WORKERS.append(self.members)

    def __enter__(self) -> "RayBackend":
        self._kept = True
        return self

    def __exit__(self, *error: object) -> None:
        self._kept = False
        self.end()

    def load_team(self, config: Config, team: Team | None, begin: Callable[[Team], None]) -> Team:
        """Return the team without weights. What is random or made here is written for the processes, which read it."""
        drawn = config.warm_start.steps > 0 or any(agent.tiny is not None for agent in config.agents.values())
        if team is not None or drawn:
            begin(team or Team(load_agents(config, load_tokenizers(config))))
        return Team(load_agents(config, load_tokenizers(config), only=()))

    def past_policies(self, section: OpponentPool, team: Team, seed: int) -> PastPolicies:
        """Return the past opponents of a run, whose weights stay in the processes."""
        return RemotePast(section, team, seed, self)

    def untrained(self, team: Team, batch_size: int) -> UntrainedWeights:
        """Return the weights that the policies of ``team`` started from, which the processes hold."""
        return RemoteUntrained(team, self)

    def prepare(self, parts: RunParts, player: Player, past: PastPolicies | None, record: RunRecord) -> None:
        """Read from the parts of the run which groups there are, and what the driver knows of each learner."""
        config = parts.config or record.describe_team(parts.team, parts.args, parts.engine_options)
        self._record = record if parts.config is None else None
        self.describe(config, parts.team, parts.args, parts.reads_values, parts.protocol.turns)

    def describe(
        self, config: Config, team: Team, args: MultiAgentPPOConfig, reading: Collection[str] = (), turns: int = 1
    ) -> None:
        """Fill in ``learners``: what the driver knows of each learner of ``team``, whose models have no weights here.

        Args:
            config: describes the team, which the processes load.
            team: the team.
            args: the trainer's arguments.
            reading: the policies whose advantages read a critic's values.
            turns: the turns of the protocol.

        Raises:
            ConfigError: the groups do not fit the policies, or something does not work with groups.
            ValueError: no policy is trainable.
        """
        config = self._away(config)
        refuse(fault for part in (undistributed, group_faults) for fault in part(config))
        if self.section.scoring.verifier is not None and self.verifier is None:
            raise ConfigError(
                "cluster.scoring: its processes read reward.verifier of a configuration, and this trainer was made "
                "without one; use build_trainer(config), or leave it out"
            )
        self.groups = groups_of(config)
        self._vllm = vllm_of(config, self.groups)
        trained = [name for name, policy in team.policies.items() if policy.trainable]
        refuse(place_faults(self.section, self.groups, trained, self._vllm, args.async_depth))
        learners: dict[str, Any] = {}
        for name, kind in team.critics(args, reading).items():
            policy = team.policies[name]
            own, adapter = policy.algorithm.arguments(args), policy.adapter is not None
            learners[name] = RemoteLearner(
                name,
                policy.tokenizer,
                own,
                CRITICS[kind],
                rate_of(own.learning_rate, adapter=adapter),
                rate_of(own.value_learning_rate, own.learning_rate, adapter=adapter),
            )
        self._sent = {name: list(sent_parameters(team.policies[name]).values()) for name in learners}
        if not learners:
            raise ValueError("no policy of the team is trainable; set trainable=True for at least one agent")
        stops = {
            name: (policy.stop_ids, () if policy.stop_strings is None else policy.stop_strings.strings)
            for name, policy in team.policies.items()
        }
        self._told = {"config": config, "args": args, "stops": stops, "seed": torch.initial_seed()}
        self._owner = {policy: name for name, group in self.groups.items() for policy in group.policies}
        self._past = {past_name(policy): policy for policy in self._owner if past_name(policy) in team.policies}
        self._owner |= {past: self._owner[policy] for past, policy in self._past.items()}
        self.learners, self._reading, self._turns, self._team = learners, tuple(reading), turns, team

    def start(self, args: Any, accelerator: Any, updates: int) -> Any:
        """Start Ray and the processes that train, and return what asks them (:class:`RemoteLearning`).

        All groups load their models at the same time. The models of the team are empty afterwards.

        Raises:
            ConfigError: the cluster has too few devices, or a model cannot be loaded.
            GroupFailed: processes died too often.
        """
        if self._record is not None:
            self._record.keep_team()
            self._team.drop_weights()
        self._end_groups()
        self.pools, self.learner_groups, self._versions, self._handles = {}, {}, {}, {}
        cluster = self.cluster = self.cluster or self._begin()
        try:
            if not cluster.started_here:
                self._check_machines(cluster)
            verifiers = 0 if self.verifier is None else self.verifier.replicas
            plan = plan_of(self.groups, self.learners, verifiers)
            self.places = cluster.reserve(plan, self.section, self._told["args"].use_cpu)
        except ConfigError:
            self.end()
            raise
        turns = Turns()
        told = self._told | {
            "args": without_devices(self._told["args"]),
            "objectives": {
                name: OBJECTIVES[name] for name in {learner.args.objective for learner in self.learners.values()}
            },
        }
        for name, group in self.groups.items():
            trained = tuple(policy for policy in group.policies if policy in self.learners)
            spec = GroupSpec(
                name=name,
                policies=tuple(group.policies),
                trained=trained,
                updates=updates,
                reading=self._reading,
                turns=self._turns,
                devices=group.learner.devices,
                strategy=group.learner.strategy,
                replicas=group.engines.replicas,
                rows=group.engines.rows,
                past={past: policy for past, policy in self._past.items() if policy in group.policies},
                vllm=self._vllm.get(name, {}),
                **told,
            )
            failures, folder = self.section.failures, self.folder
            self.pools[name] = EnginePool(spec, self._starter("engine", spec), failures, folder, turns=turns)
            if trained:
                start = self._starter("learner", spec)
                self.learner_groups[name] = LearnerGroup(spec, start, failures, folder, turns=turns)
        learning = RemoteLearning(dict(self.learners), list(self.learner_groups.values()))
        learning.on_all(lambda group: _build(group, self._tell))
        for pool in self.pools.values():
            _build(pool, self._tell)
        if self.verifier is not None:
            self.verifier.build()
        self.metrics()  # what the start took is in no update
        return learning

    def sources(self, config: Config) -> dict[str, RewardSource]:
        """Return the reward source that asks the verifier's processes, which :meth:`start` starts, if there are to be
        any."""
        places, section = self.section.scoring.verifier, config.reward.verifier
        if places is None or section is None:
            return {}
        config = self._away(config)
        told: dict[str, Any] = {"args": None, "objectives": {}, "stops": {}, "seed": config.seed}
        spec = GroupSpec(SCORING, config, (), (), 0, (), 1, 0, "replicated", places.replicas, None, **told)
        start, failures = self._starter("verifier", spec), self.section.failures
        self.verifier = VerifierPool(section, places.replicas, start, failures.deadline, Path(config.output_dir))
        return {"verifier": ServedVerifier(self.verifier, section.on_failure == "label")}

    def _away(self, config: Config) -> Config:
        """Return ``config`` for processes that may run in other folders."""
        return replace(config, cluster=self.section, output_dir=str(Path(config.output_dir).absolute()))

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self._told["config"].output_dir)

    def engines(self, parts: RunParts) -> dict[str, Engine]:
        """Return the engines of the agents. One samples in the groups' processes, in place of those that do it here."""
        pools = {policy: self.pools[name] for policy, name in self._owner.items()}
        continuous, between = self.section.batching == "flow", self.section.on_update == "finish"
        tokens = RemoteEngine(pools, self.send, continuous, between)
        engine = TextEngine(parts.team.policies, tokens, parts.args.response_length)
        remote = {agent.engine: engine for agent in parts.team.agents.values() if agent.engine in OWN_WEIGHTS}
        return super().engines(replace(parts, engines=remote | dict(parts.engines))) | remote

    def sampled_here(self) -> Collection[str]:
        """Return no policy: the weights that sample are in the groups' processes."""
        return ()

    def send(self, policy: str, version: int) -> None:
        """Send the present weights of a trained policy from the processes that train it to those that sample from
        it."""
        if self._trains(policy):
            self._handles[policy] = self.group_of(policy).kept("weights", policy)
            self.pools[self._owner[policy]].load(policy, version, self._handles[policy])

    def give(self, policy: str, weights: Any) -> None:
        """Let a policy that is not trained speak with ``weights``, a handle, from now on."""
        self._versions[policy] = self._versions.get(policy, 0) + 1
        self.pools[self._owner[policy]].load(policy, self._versions[policy], weights)

    def last_sent(self, policy: str) -> Any:
        """Return a handle of the weights that a trained policy has sent last."""
        return self._handles[policy]

    def group_of(self, policy: str) -> LearnerGroup:
        """Return the group that trains ``policy``."""
        return self.learner_groups[self._owner[policy]]

    def ask_untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights` in the group of a policy.

        A trained policy's first weights are the reference of those that train it, and others do not change.
        """
        if self._trains(policy):
            return self.group_of(policy).all("untrained", method, policy, *arguments)[0]
        return self.pools[self._owner[policy]].call("untrained", method, policy, *arguments)

    def _trains(self, policy: str) -> bool:
        name = self._owner[policy]
        return name in self.learner_groups and policy in self.learner_groups[name].spec.trained

    def stop_sampling(self) -> None:
        """End the processes that sample, which may be in a long answer and keep the devices of those that train."""
        for pool in self.pools.values():
            pool.end()

    def end_hung(self) -> None:
        """End the processes that train and do not answer at all. They would keep a run from being saved for the whole
        deadline.

        Others take their place, with the weights of the last update.
        """
        members = [member for group in self.learner_groups.values() for member in group.members]
        with Threads(len(members), "asks learners") as threads:
            asked = [threads.submit(member.answers, ANSWER) for member in members]
            for member, answers in zip(members, asked, strict=True):
                if not result(answers):
                    logger.warning(
                        "%s: does not answer within %g s, and is replaced to save the run", member.name, ANSWER
                    )
                    member.end()

    def run_ended(self) -> None:
        """End all processes, unless this is in a block ``with backend:``."""
        if not self._kept:
            self.end()

    def members(self) -> list[Member]:
        """Return the processes that run now."""
        learners = [member for group in self.learner_groups.values() for member in group.members]
        verifiers = [] if self.verifier is None else self.verifier.members
        return [*learners, *(member for pool in self.pools.values() for member in pool.members()), *verifiers]

    def metrics(self) -> dict[str, float]:
        """Return what the processes of each group did since the last time, as ``group/NAME/...``."""
        parts: list[EnginePool | LearnerGroup] = [*self.pools.values(), *self.learner_groups.values()]
        return {f"group/{part.spec.name}/{name}": value for part in parts for name, value in part.take_counts().items()}

    def end(self) -> None:
        """End all processes. A cluster that was joined goes on without them."""
        self._end_groups()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster = None
        if self.members in stacks.WORKERS:
            stacks.WORKERS.remove(self.members)

    def _end_groups(self) -> None:
        for pool in self.pools.values():
            pool.end()
        for group in self.learner_groups.values():
            group.end()
        if self.verifier is not None:
            self.verifier.end()
        if self.places is not None:
            self.places.give_back()
            self.places = None

    def _starter(self, part: Part, spec: GroupSpec) -> Callable[..., Member]:
        def start(number: int, place: int | None = None) -> Member:
            assert self.cluster is not None and self.places is not None, "start() has made them"
            device = self.places.plan.places[spec.name, part][number if place is None else place]
            return self.cluster.start(f"{spec.name} {part} {number}", part, spec, number, self.places, device)

        return start

    def _begin(self) -> Cluster:
        """Start Ray here, or join a cluster."""
        if self.section.address is not None:
            self._tell(f"joining the Ray cluster at {self.section.address}")
            return Cluster(self.section.address)
        self._tell("starting Ray on this machine")
        sent = [parameter for parameters in self._sent.values() for parameter in parameters]
        # of each policy the present weights and the next ones, and of each snapshot weights and two moments in float32
        asked = max(OBJECT_STORE, 2 * sum(parameter.nbytes + 12 * parameter.numel() for parameter in sent))
        free = free_shared_memory()
        memory = asked if free is None else min(asked, free)
        check_shared_memory(memory, self._largest(), "cluster: this machine")
        counted = self.section.devices
        places = 0 if counted == "auto" else counted.cpu
        config = self._told["config"]
        reads = [name for name, group in self.groups.items() if reads_hub(config, group.policies)]
        verifier = config.reward.verifier
        if self.verifier is not None and verifier is not None and not Path(str(verifier.model)).is_dir():
            reads.append(SCORING)
        return Cluster(memory=memory, places=places, variables=self.section.variables, reads_hub=reads)

    def _largest(self) -> int:
        """Return the bytes of the largest weights that are sent."""
        return max(sum(parameter.nbytes for parameter in parameters) for parameters in self._sent.values())

    def _check_machines(self, cluster: Cluster) -> None:
        """Check that the machines of a cluster that was joined fit each other."""
        with marked(self.folder) as mark:
            facts = cluster.facts(self.folder)
            for warning in check_facts(facts_here(str(self.folder)), facts, mark, self.folder, self._largest()):
                logger.warning(warning)


# -- the start, as a user is told of it --------------------------------------------------------------------------------


def _teller(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line to the standard error at once, or nothing if ``quiet``."""

    return (lambda line: None) if quiet else (lambda line: tell(printable(line)))


def _build(part: LearnerGroup | EnginePool, tell: Callable[[str], None]) -> None:
    """Start the processes of a part of a group, and tell which models they load, and when they have them."""
    spec, trains = part.spec, isinstance(part, LearnerGroup)
    number, what = (spec.devices, "train") if trains else (spec.replicas, "sample")
    who = f"1 process that {what}s" if number == 1 else f"{number} processes that {what}"
    tell(f"group {spec.name}: {who}: loading {', '.join(_models(spec.config, spec.policies))}")
    began = time.monotonic()
    part.build()
    tell(f"group {spec.name}: {who}: ready after {time.monotonic() - began:.0f} s")


def reads_hub(config: Config, policies: Collection[str]) -> bool:
    """Return whether something that ``policies`` begin from is a name on the hub, and no folder of this machine."""
    named = [(section.model, section.tokenizer, section.adapter) for section in _speaking(config, policies)]
    return any(name is not None and not Path(name).is_dir() for names in named for name in names)


def _models(config: Config, policies: Collection[str]) -> list[str]:
    """Return the names of the models that ``policies`` begin from, in the order of the agents."""
    speaking = _speaking(config, policies)
    return list(dict.fromkeys(section.model or "a tiny model" for section in speaking if section.weights))


def _speaking(config: Config, policies: Collection[str]) -> list[AgentSection]:
    return [
        section for name, section in config.agents.items() if set(policy_names(name, section, config)) & set(policies)
    ]
