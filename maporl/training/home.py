"""Where a team is trained and sampled from: in the launcher's processes, or in processes of other kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from maporl.config import Config
from maporl.engines.base import Engine
from maporl.engines.build import build_engines
from maporl.rewards.base import RewardSource
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.storage.run_folder import INITIAL
from maporl.team.loading import load_agents, load_tokenizers, split_bases
from maporl.team.past_policies import PastPolicies
from maporl.team.team import Team
from maporl.team.weights import load_initial
from maporl.training.check import check_kinds
from maporl.training.parts import RunParts
from maporl.training.run_record import RunRecord
from trl_ext.learning.learners import Home, Learning
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.sharding.holder import Holder

OWN_WEIGHTS = {"transformers", "vllm"}
"""The engines that sample from the weights that are trained."""


def home_of(backend: "TeamHome | None") -> "TeamHome":
    """Return ``backend``, or the launcher's processes if it is None.

    Raises:
        ValueError: ``backend`` is something else.
    """
    check_kinds({"backend": (backend, TeamHome)})
    return backend or Local()


class TeamHome(Home, ABC):
    """The interface of a backend, which holds a team's weights. The trainer plays, scores and computes advantages.

    The methods are called in this order: :meth:`load_team` and :meth:`sources`, where a configuration describes the
    run; :meth:`past_policies`, :meth:`untrained`, :meth:`prepare`, :meth:`start`, :meth:`engines`; and, after all
    updates, :meth:`run_ended`.
    """

    @abstractmethod
    def load_team(self, config: Config, team: Team | None, begin: Callable[[Team], None]) -> Team:
        """Return the team of a run, with its weights where they are to be.

        Args:
            config: describes the team.
            team: a team to train instead, which is loaded.
            begin: warm-starts a loaded team if the run says so, and writes its weights into the run's ``initial/``; or
                reads them from there.

        Raises:
            ConfigError: a model or tokenizer cannot be loaded, or they do not fit each other.
        """

    @abstractmethod
    def past_policies(self, section: OpponentPool, team: Team, seed: int) -> PastPolicies:
        """Return the past opponents of a run."""

    @abstractmethod
    def untrained(self, team: Team, batch_size: int) -> UntrainedWeights:
        """Return the weights that the policies of ``team`` started from. They are asked after :meth:`start`."""

    @abstractmethod
    def prepare(self, parts: RunParts, player: Player, past: PastPolicies | None, record: RunRecord) -> None:
        """Make ``learners``: what the trainer must know of each, with its name, tokenizer, critic and learning rate.

        Args:
            parts: the parts of the run.
            player: plays the run's dialogues. Its engines come later.
            past: what :meth:`past_policies` returned, if there are past opponents.
            record: what the run writes.
        """

    def engines(self, parts: RunParts) -> dict[str, Engine]:
        """Return the engines that the team's agents name, but those that the user has passed, by name."""
        agents = parts.team.agents.values()
        needed = {agent.name: agent.engine for agent in agents if agent.engine not in parts.engines}
        return build_engines(
            needed, parts.engine_options, parts.team.policies, parts.args, Path(str(parts.args.output_dir))
        )

    def sources(self, config: Config) -> Mapping[str, RewardSource]:
        """Return reward sources that :meth:`start` starts, by name. They take the place of the run's own."""
        return {}


class Local(TeamHome):
    """The launcher's processes, which hold all weights of the team, or their shares of them."""

    def __init__(self) -> None:
        super().__init__({})

    def load_team(self, config: Config, team: Team | None, begin: Callable[[Team], None]) -> Team:
        """Return the team with its weights, which the main process's learners send to those of the others."""
        if team is None:
            team = Team(load_agents(config, load_tokenizers(config), receives=distributed.rank() > 0))
        if config.warm_start.steps:
            begin(team)
        else:
            load_initial(team.policies.values(), Path(config.output_dir) / INITIAL)
        return team

    def past_policies(self, section: OpponentPool, team: Team, seed: int) -> PastPolicies:
        """Return past opponents whose weights are here."""
        return PastPolicies(section, team, seed)

    def untrained(self, team: Team, batch_size: int) -> UntrainedWeights:
        """Return the references of learners, and the weights of those that do not learn."""

        def model_of(policy: str) -> AbstractContextManager[Any]:
            learner = self.learners.get(policy)
            return team.policies[policy].active() if learner is None else learner.policy.reference_model()

        return UntrainedWeights(team, model_of, batch_size)

    def prepare(self, parts: RunParts, player: Player, past: PastPolicies | None, record: RunRecord) -> None:
        """Build the learners."""
        self._team, self._player, self._past = parts.team, player, past
        self.references_sample = parts.asks_untrained is not None
        turns, reading = parts.protocol.turns, parts.reads_values
        self.central = parts.team.build_central_critic(parts.args, turns, reading)
        self.learners = parts.team.build_learners(parts.args, turns, reading, self.central)

    def base_devices(self, args: Any) -> dict[int, torch.device]:
        """Return a device for every base model if ``placement`` is split. Otherwise all share one device."""
        return split_bases(self._team.policies, args.use_cpu) if args.placement == "split" else {}

    def start(self, args: Any, accelerator: Any, updates: int) -> Learning:
        """Bring all models to their devices. Those that nobody trains are distributed as trained ones are."""
        learning = super().start(args, accelerator, updates)
        trained = {id(base_of(learner.model)): learner.strategy for learner in self.learners.values()}
        strategy = next(iter(self.learners.values())).strategy
        frozen: dict[int, Holder] = {}
        for name, policy in self._team.policies.items():
            base = id(base_of(policy.model))
            if base not in trained and base not in frozen:
                device = self.devices.get(base, accelerator.device)
                frozen[base] = Holder() if policy.is_quantized else strategy.freeze(policy.model, device)
            learning.holders[name] = trained[base] if base in trained else frozen[base]
        if self._past is not None and self._past.past.adapter is None:
            self._past.holder = frozen[id(base_of(self._past.past.model))]
        self._holders = learning.holders
        return learning

    def sampled_here(self) -> Collection[str]:
        """Return all policies but a whole past one, or none if every engine samples from copies of the weights.

        The collector opens a whole past policy itself, because it has other weights first. Those of a past adapter are
        loaded into the opened model.
        """
        past = [] if self._past is None else [self._past.past.name]
        engines = self._player.engines
        elsewhere = all(engines[agent.engine].remote for agent in self._team.agents.values())
        names = [] if elsewhere and not self.references_sample else [n for n in self._holders if n not in past]
        return names + past if self._past is not None and self._past.past.adapter is not None else names
