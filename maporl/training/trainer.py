"""Multi-agent PPO: train the policies and critics of a team of agents together, on their dialogues.

``MultiAgentPPOTrainer`` only connects five parts. A :class:`maporl.rollout.player.Player` plays dialogues. A
:class:`maporl.rewards.scoring.Scorer` scores them and assigns credit. :class:`maporl.training.assign.TeamAdvantages`
turns credit into advantages. :class:`trl_ext.learning.learners.Learning` updates the weights. The run folder records
the results.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from maporl.config import Config
from maporl.config.schema import AdvantageConfig, BranchingSection, RewardSection
from maporl.decoding import TeamSampling
from maporl.engines.base import Engine
from maporl.environments.build import TeamTools
from maporl.protocols.base import Protocol
from maporl.report.audit import metric_counts
from maporl.rewards.base import RewardSource
from maporl.schedules import Schedule
from maporl.tasks.base import Task
from maporl.team.team import Team
from maporl.training.ahead import Ahead, batches_to_begin
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.assign import TeamAdvantages
from maporl.training.collect import Collector
from maporl.training.dialogue_metrics import measured
from maporl.training.home import TeamHome, home_of
from maporl.training.parts import RunParts
from maporl.training.run_record import RunRecord
from maporl.training.samples import TeamUpdateBatch, samples_by_policy
from maporl.training.team_loop import TeamLoop
from maporl.training.untrained import UntrainedCounter
from maporl.types import why_nobody
from trl_ext.errors import short_trace
from trl_ext.learning.metrics import Clock
from trl_ext.process.waits import check
from trl_ext.trainer.scoring import RewardFunction


class MultiAgentPPOTrainer(TeamLoop):
    """Trains a team with PPO on the dialogues that its agents play.

    Args:
        args: a :class:`MultiAgentPPOConfig`.
        team: the agents and the policies that speak for them.
        task: the questions to train on. ``train_dataset`` may take its place.
        protocol: who speaks when, and what each agent sees. The default is a debate of two turns.
        eval_task: held-out questions for ``evaluate()``.
        reward: the reward sources, and the rules that assign credit to turns and agents.
        speakers: the agents that play, in order. By default the whole team plays.
        schedule: which agents are trained in which updates. By default all are trained in all updates.
        advantage: how credits become advantages. The default is PPO's GAE, whitened for each agent and turn.
        branching: the number of training dialogues for each question, and where they fork. The default is one.
        curriculum: pairs (update, task) in rising order. From that update on, questions come from that task.
        sources: reward sources by name. They replace or extend ``maporl.rewards.SOURCES``, and may be plain functions.
        engines: engines by name. They replace or extend ``maporl.engines.ENGINES``.
        engine_options: for each agent, the options of its engine (the YAML sections ``api`` and ``vllm``).
        callbacks: further ``TrainerCallback`` objects.
        train_dataset: rows with a column ``prompt``, in place of ``task`` (:class:`maporl.Prompts`).
        eval_dataset: such rows in place of ``eval_task``.
        reward_funcs: functions with the signature of TRL's ``GRPOTrainer`` (:class:`maporl.rewards.functions.
            CompletionReward`). They take the place of the sources of ``reward``.
        reward_weights: a weight for each of ``reward_funcs``. The default is 1.
        tools: for each agent, what it may call: typed functions with docstrings as TRL takes them, :class:`maporl.Tool`
            objects, and names of environments or ``ENVIRONMENT.TOOL``.
        environments: by name, the class of an environment in which agents act, as TRL's ``environment_factory``. It
            belongs to the agents whose tools name it, or to all if none do: they have its tools, see its texts,
            and get its rewards.
        sampling: how answers are sampled in a role, or in evaluations. That of an agent in training is its own
            (:class:`maporl.Agent`).
        backend: where to train and sample, such as :class:`maporl.RayBackend`. By default in the launcher's processes.
            The team's weights then go to other processes, and its models are empty.
        config: the configuration that the other arguments were built from, which the run then keeps. By default the run
            describes its parts itself.

    Attributes:
        before: the :class:`Evaluation` before training. None without ``eval_task``, and until :meth:`train` is called.
        after: the :class:`Evaluation` after training, in the same way.

    Raises:
        ValueError: the parts do not fit each other. The message says which, and what to do.
        ConfigError: a reward source, an engine or the protocol cannot be built.
    """

    @short_trace
    def __init__(
        self,
        args: MultiAgentPPOConfig,
        team: Team,
        task: Task | None = None,
        protocol: Protocol | None = None,
        eval_task: Task | None = None,
        reward: RewardSection | None = None,
        speakers: Sequence[str] | None = None,
        schedule: Schedule | None = None,
        advantage: AdvantageConfig | None = None,
        branching: BranchingSection | None = None,
        curriculum: Sequence[tuple[int, Task]] = (),
        sources: Mapping[str, RewardSource] | None = None,
        engines: Mapping[str, Engine] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        config: Config | None = None,
        *,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        reward_weights: Sequence[float] | None = None,
        tools: Mapping[str, Sequence[Any]] | TeamTools | None = None,
        environments: Mapping[str, Any] | None = None,
        sampling: TeamSampling | None = None,
        backend: TeamHome | None = None,
    ):
        home = home_of(backend)
        self.parts = parts = RunParts.of(
            args, team, task, protocol=protocol, eval_task=eval_task, reward=reward, speakers=speakers,
            schedule=schedule, advantage=advantage, branching=branching, curriculum=curriculum, sources=sources,
            engines=engines, engine_options=engine_options, callbacks=callbacks, config=config,
            train_dataset=train_dataset, eval_dataset=eval_dataset, reward_funcs=reward_funcs,
            reward_weights=reward_weights, tools=tools, environments=environments, sampling=sampling,
        )  # fmt: skip
        self.team, self.task, self.eval_task = team, parts.task, parts.eval_task
        self.record = RunRecord(Path(str(args.output_dir)), config)
        self.schedule = parts.schedule.resolved(parts.protocol.turns, team.names())
        pool = self.schedule.opponent_pool
        self.past_policies = None if pool is None else home.past_policies(pool, team, args.seed)
        self.player = parts.player(home.untrained(team, args.batch_rows))
        for source in self.player.scorer.sources.values():
            source.follow(lambda: self.state)
        home.prepare(parts, self.player, self.past_policies, self.record)
        self.collector = Collector(self.player, parts.branching, args, frozenset(home.learners), self.past_policies)
        with_critic = {name for name, learner in home.learners.items() if learner.critic.gives_values}
        options = {name: learner.args for name, learner in home.learners.items()}
        self.advantages = TeamAdvantages(parts.advantages, options, with_critic, parts.reward.sources)
        self.untrained = UntrainedCounter(bool(parts.reward.rules), parts.own_sources())
        self.distillation, self.role_gradients = parts.distillation(), parts.role_gradients()
        self._ahead: Ahead[TeamUpdateBatch] = Ahead(args.async_depth, self.player.interleaving)
        with self.undone_if_it_fails(home):
            self.setup(home, args, self.task, self.eval_task or self.task, list(parts.callbacks))
            self.player.engines |= home.engines(parts) | dict(parts.engines)
            self.check_ahead()
            self.check_roles()
        self.show_progress()

    def inform_samplers(self) -> None:
        """Let the engines take over the weights of all policies, unless they have them."""
        self.player.inform_engines(self._whole_policy, self.state.global_step)

    def _whole_policy(self, policy: str) -> AbstractContextManager:
        """Return a context manager that gives this process the whole weights of ``policy``."""
        return self.learning.whole_weights([policy])

    @property
    def engines(self) -> dict[str, Engine]:
        """Return the player's engines by name."""
        return self.player.engines

    # -- the seams ----------------------------------------------------------------------------------------------------

    def next_batch(self, ahead: int = 0) -> TeamUpdateBatch:
        """Return the next update's batch, with this process's questions from the present task of the curriculum."""
        step = self.state.global_step
        number = step + 1 + ahead
        task = next((task for first, task in reversed(self.parts.curriculum) if number >= first), self.task)
        examples = [task[i] for i in self.indices(len(task), ahead)]
        plan = self.schedule.plan(number)
        warmups = {name: self.team.policies[name].algorithm.critic_warmup for name in self.learners}
        alone = {n for n, own in warmups.items() if (plan.critic_only if own is None else number <= own)}
        return TeamUpdateBatch(number, step, examples, task=task, plan=plan, critic_only=frozenset(alone))

    def collected(self) -> TeamUpdateBatch:
        """Return this update's batch.

        With ``async_depth`` later ones are begun, and it was begun in earlier updates.
        """
        if not self.args.async_depth:
            return super().collected()
        number = self.state.global_step + 1
        to_begin = batches_to_begin(number, self._ahead.in_progress, self.args.async_depth, self.state.max_steps)
        with self.sampling_weights():
            for later in to_begin:
                self._ahead.begin(partial(self.collect, self.next_batch(ahead=later - number)))
            return self._ahead.take()

    def collect(self, batch: TeamUpdateBatch) -> TeamUpdateBatch:
        """Play the dialogues of every question, with the configured branching."""
        # all processes enter the weights of past policies together
        alone = self.droppable() if self.past_policies is None else nullcontext()
        with alone, self.player.interleaving.running():
            self.collector.collect(batch)
        return batch

    def score(self, batch: TeamUpdateBatch) -> TeamUpdateBatch:
        """Grade and score every answer, and assign credit to the utterances."""
        asked = [agent for source in self.player.scorer.sources.values() for agent in source.agents]
        judges = [p.name for agent in asked for p in self.team.policies_of.get(agent, ())]
        self.player.scorer.meet(batch.dialogues)
        try:
            with (
                self.learning.whole_weights(judges, self.home.references_sample),
                self.player.interleaving.running(),
                self.droppable(),
            ):
                self.player.scorer.credit(batch.dialogues, batch.task, batch.number)
        finally:
            self.player.world.drop_scored(batch.dialogues)
        if not self._ahead.in_progress:
            for engine in self.engines.values():
                engine.release()  # judges may have spoken, and the update needs the memory
        return batch

    def advantage(self, batch: TeamUpdateBatch) -> TeamUpdateBatch:
        """Fill in the token batch of each policy, with advantages over the dialogues of all processes.

        Raises:
            RewardFailure: no utterance of an agent has a credit, in the first update that would train it.
        """
        tokenizers = {name: learner.tokenizer for name, learner in self.learners.items()}
        with self.player.interleaving.running():  # tokenizers are not made for several threads
            batch.samples = samples_by_policy(
                batch.dialogues,
                tokenizers,
                batch.plan,
                batch.number,
                self.parts.protocol.turns,
                {name: learner.args for name, learner in self.learners.items()},
            )
            batch.metrics |= self.untrained.measure(batch, tokenizers)
        batch.counts |= self._due(batch)
        if self.distillation is not None:
            batch.metrics |= self.named_metrics(self.distillation.add(batch, self.learning))
        together = torch.device("cpu") if self.args.placement == "split" else None
        metrics = self.advantages.fill(batch, self.learning, together)
        batch.count(metrics)
        batch.metrics |= self.named_metrics(metrics)
        if self.role_gradients is not None:
            batch.metrics |= self.named_metrics(self.role_gradients.measure(batch, self.learning))
        return batch

    def _due(self, batch: TeamUpdateBatch) -> dict[str, float]:
        """Return which learners the plan of an update trains."""
        turns = range(max(self.parts.protocol.turns, 1))
        return {
            f"learner/{name}/due": float(
                name not in batch.critic_only
                and any(batch.plan.learns(a, turn) for a in self.team.policies[name].agents for turn in turns)
            )
            for name in self.learners
        }

    def finish_update(self, batch: TeamUpdateBatch, clock: Clock | None = None) -> None:
        """Send the new weights to the engines, let reward sources learn, and record the update."""
        with self.skippable():  # servers may not answer, and who ends needs no answers
            check()
            if not all(engine.between for engine in self.engines.values()):
                self._ahead.settle()  # an answer must not mix two sets of weights
            self.player.sync_engines(self.learners, self._whole_policy, batch.number)
        with self.player.interleaving.running():
            batch.metrics |= measured(batch, self.player, bool(self.args.async_depth))
        if self.player.protocol.runs_program:
            self.nobody_asked = why_nobody([*batch.dialogues, *batch.dropped])
            vars(self).pop("_facts", None)  # it is one of them
        batch.counts |= metric_counts(batch.metrics, self.learners)
        for count in ("asked", "due"):
            learners = [batch.counts.get(f"learner/{name}/{count}", 0.0) for name in self.learners]
            batch.counts[f"run/the run/{count}"] = sum(learners)
        if self.args.async_depth:
            batch.metrics["async/in_progress"] = float(self._ahead.in_progress)
        if self.past_policies is not None and self.past_policies.is_due(batch.number):
            with self._whole_policy(self.past_policies.policy.name):
                self.past_policies.take_snapshot()
        with self.player.interleaving.running():  # tokenizers are not made for several threads
            self.record.add(batch, self.learners, self.args.dialogues_logged, self.player.scorer)
        super().finish_update(batch, clock)
