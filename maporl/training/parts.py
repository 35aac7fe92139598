"""The parts of a run: the arguments of :class:`maporl.MultiAgentPPOTrainer`, completed and checked against each other.

No model is touched here, so that what does not fit is known before anything is loaded or begun.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import TrainerCallback

from maporl.advantages.baselines import baseline_of
from maporl.config import Config
from maporl.config.algorithm import alike
from maporl.config.imports import extension
from maporl.config.schema import AdvantageConfig, BranchingSection, RewardSection
from maporl.decoding import TeamSampling, greedy_learners
from maporl.engines.base import Engine
from maporl.environments.build import TeamTools
from maporl.errors import Fault, UserError, refuse
from maporl.protocols import growth
from maporl.protocols.base import Protocol, must_be_protocol
from maporl.protocols.debate import Debate
from maporl.rewards.base import RewardSource
from maporl.rewards.build import SOURCES, asks_untrained
from maporl.rewards.check import lengths, never_ends
from maporl.rewards.functions import with_functions
from maporl.rollout.episode import SpeakerSpec
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import Schedule
from maporl.tasks.base import Task
from maporl.tasks.prompts import questions_of
from maporl.team.exchange import swapped
from maporl.team.team import Team
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.check import check_kinds, fitting, value_range
from maporl.training.learns_from import MOST_UPDATES, learns_from, who_learns
from maporl.training.lonely import Grouping, lonely_groups
from trl_ext.learning.config import check_args
from trl_ext.trainer.scoring import RewardFunction

KINDS = {
    "team": Team, "protocol": Protocol, "reward": RewardSection, "schedule": Schedule, "advantage": AdvantageConfig,
    "branching": BranchingSection, "sources": Mapping, "engines": Mapping, "engine_options": Mapping,
}  # fmt: skip
"""What the parts of a trainer must be."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The components of a run. The fields are the arguments of :class:`maporl.MultiAgentPPOTrainer`.

    Where an argument may be left out, the field has what the run takes instead. ``reward`` and ``sources`` have the
    reward functions, ``task`` and ``eval_task`` the data sets, and ``tools`` the environments.
    """

    args: MultiAgentPPOConfig
    team: Team
    task: Task
    eval_task: Task | None
    speakers: tuple[str, ...]
    tools: TeamTools
    sampling: TeamSampling
    protocol: Protocol
    reward: RewardSection
    sources: Mapping[str, RewardSource]
    schedule: Schedule = field(default_factory=Schedule)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    branching: BranchingSection = field(default_factory=BranchingSection)
    curriculum: Sequence[tuple[int, Task]] = ()
    engines: Mapping[str, Engine] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[TrainerCallback] = field(default_factory=list)
    config: Config | None = None

    @classmethod
    def of(
        cls,
        args: MultiAgentPPOConfig,
        team: Team,
        task: Task | None = None,
        protocol: Protocol | None = None,
        *,
        reward: RewardSection | None = None,
        sources: Mapping[str, RewardSource] | None = None,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        eval_task: Task | None = None,
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        reward_weights: Sequence[float] | None = None,
        speakers: Sequence[str] | None = None,
        tools: Mapping[str, Sequence[Any]] | TeamTools | None = None,
        environments: Mapping[str, Any] | None = None,
        sampling: TeamSampling | None = None,
        **others: Any,
    ) -> "RunParts":
        """Return the parts of the run that a trainer with these arguments makes. ``others`` are fields with
        defaults, for which None stands too.

        Raises:
            ValueError: an argument is of another kind, or two of them do not fit each other.
            ConfigError: an option of a part is wrong.
        """
        check_args(args, MultiAgentPPOConfig)
        named = others | {"team": team, "protocol": protocol, "reward": reward, "sources": sources}
        check_kinds({name: (named.get(name), kind) for name, kind in KINDS.items()})
        task, eval_task = questions_of(task, train_dataset, eval_task, eval_dataset)
        if eval_task is None and args.eval_strategy != "no":
            raise ValueError(
                "eval_steps: nothing to evaluate on; pass eval_dataset or eval_task, or leave eval_steps out"
            )
        protocol = must_be_protocol(protocol or Debate(), "protocol")
        reward = reward or RewardSection()
        if reward_funcs is not None:
            reward, sources = with_functions(reward, sources, reward_funcs, reward_weights, task)
        playing = tuple(speakers or team.names())
        if not isinstance(tools, TeamTools):
            tools = TeamTools.of(tools, environments, playing, protocol.acts_in)
        parts = cls(
            args=args, team=team, task=task, protocol=protocol, eval_task=eval_task, reward=reward,
            sources=dict(sources or {}), speakers=playing, tools=tools, sampling=team.sampling(sampling),
            **{name: part for name, part in others.items() if part is not None},
        )  # fmt: skip
        refuse(swapped(parts.schedule, {name: agent.learns_by for name, agent in team.agents.items()}), "trainer")
        for _, own_advantage, own_args in parts.algorithms():
            refuse(fitting(parts.branching, reward, protocol, own_advantage, own_args), "trainer")
            if own_args.value_loss == "hl_gauss" and own_args.value_range is None:
                found = value_range(reward, own_advantage, own_args, protocol, len(playing))
                args.value_range = [
                    f(a, b) for f, a, b in zip((min, max), args.value_range or found, found, strict=True)
                ]
        refuse(growth.faults(protocol, parts.schedule.growth, playing), "trainer")
        refuse(greedy_learners(parts.sampling, parts.learning_roles(), protocol.roles), "trainer")
        longest = {name: parts.sampling.longest(name, args.response_length) for name in parts.learning_roles()}
        refuse(lengths(reward, longest, never_ends(args)), "trainer")
        parts._refuse_groups_of_one()
        return parts

    def _refuse_groups_of_one(self) -> None:
        """Refuse an advantage that would find nothing to compare an answer with, in the first update.

        Two questions are played with mock completions. Environments and programs, which may be anywhere, are not:
        there the first update or :func:`maporl.check` shows it. A configuration had its dry run before its models were
        loaded.

        Raises:
            ConfigError: a group has one member, whatever is said.
        """
        protocol, learners = self.protocol, self.learning_roles()
        elsewhere = self.tools.world.environments or protocol.waits
        if self.config is not None or elsewhere or not learners or len(self.task) == 0:
            return
        schedule = self.schedule.resolved(protocol.turns, self.team.names())
        agents = {name: self.team.agents[name] for name in self.speakers if name in self.team.agents}
        specs = {
            name: SpeakerSpec("players", (name,), frozenset(learners), agent.system, agent.role)
            for name, agent in agents.items()
        }
        asked = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        grouping = Grouping(
            task=self.task,
            protocol=protocol.at_update(1).in_rehearsal(),
            specs=specs,
            decoding=self.args.decoding,
            world=self.tools.world,
            branching=self.branching,
            reward=self.reward,
            advantages=self.advantages,
            plans=[schedule.plan(1)],
            questions=min(asked, 2) if all("prompt" in own.key for own in self.advantages.values()) else asked,
        )
        alone: list[Fault] = []
        with suppress(UserError):  # a protocol or a rule may not bear made-up words; the run has real ones
            alone = list(lonely_groups(grouping))
        refuse(alone, "trainer")

    def player(self, untrained: UntrainedWeights) -> Player:
        """Return the player of the run's dialogues. Its engines come later.

        ``untrained`` are asked if :attr:`asks_untrained` says so.
        """
        return Player(
            self.team,
            self.protocol,
            self.args,
            self.reward,
            sources=self.sources,
            speakers=self.speakers,
            common_seed=self.branching.common_seed,
            untrained=untrained if self.asks_untrained else None,
            tools=self.tools,
            sampling=self.sampling,
            restates=self.args.restate == "base_model",
            growth=self.schedule.growth,
        )

    def distillation(self) -> Any:
        """Return what teaches first answers, a ``maporl.methods.distillation.Distillation``, or None.

        Raises:
            ConfigError: its teacher cannot teach this team.
        """
        section = self.reward.distill
        if section is None:
            return None
        return extension("maporl.methods.distillation:Distillation", "reward.distill")(section, self.team)

    def own_sources(self) -> list[str]:
        """Return the names of the reward sources that the library does not have and that the protocol does not pay."""
        pays = self.protocol.pays | self.tools.world.offers.rewards()
        return [name for name, weight in self.reward.sources.items() if weight and name not in {*SOURCES, *pays}]

    def learns_from(self, learners: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return in plain sentences what the run learns from (:func:`maporl.training.learns_from.learns_from`)."""
        turns, updates = self.protocol.turns, self.args.num_total_batches or MOST_UPDATES
        schedule = self.schedule.resolved(turns, tuple(self.team.agents))
        told = who_learns(schedule, tuple(self.learning_roles()), self.speakers, turns, updates)
        algorithms = self.algorithms()
        return [told, *learns_from(self.reward, algorithms, self.branching, self.args, learners)]

    def role_gradients(self) -> Any:
        """Return what measures and balances the gradients of roles, or None if nothing does."""
        every, balance = self.args.role_gradients, self.args.balance
        if not every and balance != "role":
            return None
        return extension("maporl.methods.role_gradients:RoleGradients", "training.role_gradients")(every, balance)

    def learning_roles(self) -> dict[str, str | None]:
        """Return the agents that play and have a policy that is trained, with their own roles."""
        policies_of = self.team.policies_of
        return {
            name: agent.role
            for name in self.speakers
            if (agent := self.team.agents.get(name)) is not None
            and any(policy.trainable for policy in policies_of.get(name, ()))
        }

    @cached_property
    def advantages(self) -> dict[str, AdvantageConfig]:
        """How the credits of each agent become advantages."""
        return {name: agent.learns_by.advantages(self.advantage) for name, agent in self.team.agents.items()}

    def algorithms(self) -> list[tuple[list[str], AdvantageConfig, MultiAgentPPOConfig]]:
        """Return for agents that learn alike their names, how their credits become advantages, and their arguments."""
        learns = {name: self.team.agents[name].learns_by for name in self.learning_roles()}
        firsts = {names[0]: names for names in alike(learns)}
        return [(names, self.advantages[n], learns[n].arguments(self.args)) for n, names in firsts.items()]

    @property
    def reads_values(self) -> frozenset[str]:
        """The policies that have critics: those of agents whose advantages read values."""
        reading = {name for name, advantage in self.advantages.items() if baseline_of(advantage).needs_critic}
        return frozenset(p.name for p in self.team.policies.values() if not reading.isdisjoint(p.agents))

    @property
    def asks_untrained(self) -> str | None:
        """The option that asks the weights before training, or None."""
        return asks_untrained(self.args.restate, self.reward.asked)
