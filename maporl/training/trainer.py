"""Multi-agent PPO: train the policies and critics of a team of agents together, on their dialogues.

``MultiAgentPPOTrainer`` only connects five parts. A :class:`maporl.rollout.player.Player` plays dialogues. A
:class:`maporl.rewards.scorer.Scorer` scores them and assigns credit. :class:`maporl.training.assign.Advantages` turns
credit into advantages. :class:`trl_ext.learning.learners.Learning` updates the weights. The run folder records the
results.
"""

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from maporl.advantages.baselines import baseline_of
from maporl.config import Config
from maporl.config.schema import AdvantageConfig, BranchingSection, RewardSection
from maporl.decoding import TeamSampling, greedy_learners
from maporl.engines.base import Engine
from maporl.engines.build import build_engines
from maporl.environments.build import TeamTools
from maporl.errors import refuse
from maporl.evaluation.metrics import Evaluation
from maporl.protocols import growth
from maporl.protocols.base import Protocol, must_be_protocol
from maporl.protocols.debate import Debate
from maporl.rewards.base import RewardSource
from maporl.rewards.functions import with_functions
from maporl.rewards.likelihood import asks_untrained
from maporl.rewards.metrics import mean_rewards, reward_sums
from maporl.rewards.verifier.identity import record_verifiers
from maporl.rollout.player import Player, evaluate_everywhere
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import Schedule
from maporl.storage.run_folder import RunFolder
from maporl.tasks.base import Task, tasks_by_name
from maporl.tasks.prompts import Prompts, questions_of
from maporl.team.devices import split_bases
from maporl.team.past_policies import PastPolicies
from maporl.team.team import Team
from maporl.training import ahead
from maporl.training.ahead import Ahead, batches_to_begin
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.assign import Advantages
from maporl.training.backend import Backend
from maporl.training.check import check_kinds, fitting
from maporl.training.collect import Collector
from maporl.training.description import RunParts
from maporl.training.dialogue_metrics import (
    mention_no_calls,
    proposal_metrics,
    staleness_metrics,
    tool_metrics,
    verdict_metrics,
)
from maporl.training.model_card import CardFacts, write_model_card
from maporl.training.progress import TeamProgress
from maporl.training.run_record import AFTER, BEFORE, CONFIG, RunRecord
from maporl.training.samples import samples_by_policy
from maporl.training.token_traces import trace
from maporl.training.untrained import UntrainedCounter
from maporl.training.update_batch import TeamUpdateBatch
from maporl.types import Dialogue, Example
from trl_ext.files.paths import below
from trl_ext.learning.central_critic import CentralCritic
from trl_ext.learning.checkpoint import Saved
from trl_ext.learning.config import check_args
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Clock, Metrics
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.process.waits import check
from trl_ext.sharding.frozen import Frozen
from trl_ext.trainer.loop import PPOLoop
from trl_ext.trainer.resuming import Remembers
from trl_ext.trainer.scoring import RewardFunction

OWN_WEIGHTS = {"transformers", "vllm"}
"""The engines that sample from the weights that are trained. A backend has another one in their place."""


class MultiAgentPPOTrainer(PPOLoop[TeamUpdateBatch]):
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
            belongs to the agents whose tools name it, or to all if nobody's do: they have its tools, are told of it,
            and are paid.
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
        backend: Backend | None = None,
    ):
        check_args(args, MultiAgentPPOConfig)
        check_kinds(
            {
                "team": (team, Team), "protocol": (protocol, Protocol), "reward": (reward, RewardSection),
                "schedule": (schedule, Schedule), "advantage": (advantage, AdvantageConfig),
                "branching": (branching, BranchingSection), "sources": (sources, Mapping), "engines": (engines, Mapping),  # noqa: E501
                "engine_options": (engine_options, Mapping), "backend": (backend, Backend),
            }
        )  # fmt: skip
        task, eval_task = questions_of(task, train_dataset, eval_task, eval_dataset)
        if eval_task is None and args.eval_strategy != "no":
            raise ValueError(
                "eval_steps: nothing to evaluate on; pass eval_dataset or eval_task, or leave eval_steps out"
            )
        self.team, self.task, self.eval_task, self.curriculum = team, task, eval_task, list(curriculum)
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        branching = branching or BranchingSection()
        self.run, self.record = RunFolder(str(args.output_dir)), RunRecord(Path(str(args.output_dir)), config)
        advantage = advantage or AdvantageConfig()
        protocol = must_be_protocol(protocol or Debate(), "protocol")
        reward = reward or RewardSection()
        if reward_funcs is not None:
            reward, sources = with_functions(reward, sources, reward_funcs, reward_weights, task)
        refuse(fitting(branching, reward, protocol, advantage, args), "trainer")
        self.schedule = (schedule or Schedule()).resolved(protocol.turns, team.names())
        pool = self.schedule.opponent_pool
        past = PastPolicies if backend is None else backend.past_policies
        self.past_policies = None if pool is None else past(pool, team, args.seed)
        self.references_sample = asks_untrained(args.restate, reward.sources) is not None
        rows = args.local_rollout_forward_batch_size
        untrained = UntrainedWeights(team, self._untrained_model, rows) if backend is None else backend.untrained(team)
        if not isinstance(tools, TeamTools):
            tools = TeamTools.of(tools, environments, speakers or team.names(), protocol.acts_in)
        self.player = Player.build(
            team,
            protocol,
            args,
            reward,
            sources=sources,
            speakers=speakers,
            common_seed=branching.common_seed,
            untrained=untrained if self.references_sample else None,
            tools=tools,
            sampling=sampling,
            restates=args.restate == "base_model",
            growth=self.schedule.growth,
        )
        refuse(growth.faults(protocol, self.schedule.growth, self.player.speakers), "trainer")
        learning = {
            name: agent.role
            for name, agent in team.agents.items()
            if name in self.player.speakers and any(p.trainable for p in team.policies_of.get(name, ()))
        }
        refuse(greedy_learners(self.player.sampling, learning, protocol.roles), "trainer")
        for source in self.player.scorer.sources.values():
            source.follow(lambda: self.state)
        self._critic_outputs = protocol.turns if args.critic_per_turn else 1
        critics = baseline_of(advantage).needs_critic
        self.backend, self._has_critics = backend, critics
        central = team.build_central_critic(args, self._critic_outputs) if critics and backend is None else None
        learners: Any
        if backend is None:
            learners = team.build_learners(args, self._critic_outputs, critics, central)
        else:
            described = config or self.record.describe_team(team, args, engine_options or {})
            learners = backend.describe(described, team, args, critics)
        self.collector = Collector(self.player, branching, args, frozenset(learners), self.past_policies)
        with_critic = {name for name, learner in learners.items() if learner.critic != "none"}
        self.advantages = Advantages(advantage, args, with_critic, self.player.scorer.reward.sources)
        playing = [
            name for name in self.player.speakers if any(p.name in learners for p in team.policies_of.get(name, ()))
        ]
        self.untrained = UntrainedCounter(playing, bool(reward.rules))
        self._engine_options = dict(engine_options or {})
        self._parts = RunParts(
            args,
            task,
            protocol,
            eval_task,
            reward,
            self.player.speakers,
            schedule or Schedule(),
            advantage,
            branching,
            self.curriculum,
            dict(sources or {}),
            list(callbacks or []),
            tools,
            self.player.sampling,
        )
        self._ahead: Ahead[TeamUpdateBatch] = Ahead(args.async_depth, self.player.interleaving)
        with self._undone_if_it_fails():
            if backend is not None and config is None:
                self.record.keep_team()
                team.drop_weights()
            self.setup(learners, args, task, eval_task or task, (None, None), callbacks, central)
            self._build_engines(engines or {}, args)
            if args.async_depth:
                self._check_ahead(asks_untrained(args.restate, reward.sources))
        self.progress = TeamProgress()
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)
        if not args.disable_tqdm:
            self.add_callback(self.progress)

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """End the backend's processes and empty the run's new folder, if the block fails."""
        try:
            yield
        except BaseException:
            if self.backend is not None:
                self.backend.run_ended()
                self.record.failed()
            raise

    def _build_engines(self, passed: Mapping[str, Engine], args: MultiAgentPPOConfig) -> None:
        """Build the engines that agents name: those ``passed`` take precedence, then those of the backend."""
        engines = dict(passed)
        if self.backend is not None:
            used = {agent.engine for agent in self.team.agents.values()} & OWN_WEIGHTS
            engines = dict.fromkeys(used, self.backend.engine(self.team, args)) | engines
        needed = {name: agent.engine for name, agent in self.team.agents.items() if agent.engine not in engines}
        built = build_engines(needed, self._engine_options, self.team.policies, args, Path(str(args.output_dir)))
        self.player.engines |= {**built, **engines}

    def _check_ahead(self, untrained: str | None) -> None:
        """Check that dialogues can be played ahead. ``untrained`` names what asks the weights before training."""
        engines = {agent.engine: self.engines[agent.engine] for agent in self.team.agents.values()}
        faults = ahead.faults(
            self.args.async_depth,
            {name: engine.remote for name, engine in engines.items()},
            {name: engine.between for name, engine in engines.items()},
            untrained,
            self.args.engine_tis_cap,
            self.past_policies is not None,
            distributed.size(),
        )
        refuse(faults, "trainer")

    def _untrained_model(self, policy: str) -> Any:
        """Return a context manager that opens a policy's model with its weights before training."""
        learner = self.learners.get(policy)
        return self.team.policies[policy].active() if learner is None else learner.reference_model()

    def inform_samplers(self) -> None:
        """Let the engines take over the weights of all policies, unless they have them."""
        self.player.inform_engines(self._whole_policy, self.state.global_step)

    def sampled_here(self) -> Collection[str]:
        """Return all policies but a whole past one, or none if every engine samples from copies of the weights.

        The collector opens a whole past policy itself, because it has other weights first. Those of a past adapter are
        loaded into the opened model.
        """
        if self.backend is not None:
            return []
        pool = self.past_policies
        past = [] if pool is None else [pool.past.name]
        elsewhere = all(self.engines[agent.engine].remote for agent in self.team.agents.values())
        current = (
            [] if elsewhere and not self.references_sample else [n for n in self.learning.holders if n not in past]
        )
        return current + past if pool is not None and pool.past.adapter is not None else current

    def _whole_policy(self, policy: str) -> AbstractContextManager:
        """Return a context manager that gives this process the whole weights of ``policy``."""
        return self.learning.whole_weights([policy])

    @property
    def engines(self) -> dict[str, Engine]:
        """Return the player's engines by name."""
        return self.player.engines

    def place(self) -> dict[int, torch.device]:
        """Return a device for every base model if ``placement`` is split. Otherwise all share one device."""
        self._places = split_bases(self.team.policies, self.args.use_cpu) if self.args.placement == "split" else {}
        return self._places

    def build_learning(self, learners: Any, updates: int, optimizers: tuple, central: CentralCritic | None) -> Any:
        """Bring all models to their devices, or let the backend do so."""
        if self.backend is not None:
            return self.backend.start(learners, updates, self._has_critics, self._critic_outputs)
        learning = super().build_learning(learners, updates, optimizers, central)
        self._place_frozen(learning)
        return learning

    def _place_frozen(self, learning: Learning) -> None:
        """Bring the models that nobody trains to their devices, distributed over the processes as trained ones are."""
        trained = {id(base_of(learner.model)): learner.strategy for learner in self.learners.values()}
        strategy = next(iter(self.learners.values())).strategy
        frozen: dict[int, Frozen] = {}
        for name, policy in self.team.policies.items():
            base = id(base_of(policy.model))
            if base not in trained and base not in frozen:
                device = self._places.get(base, self.accelerator.device)
                frozen[base] = Frozen() if policy.is_quantized else strategy.freeze(policy.model, device)
            learning.holders[name] = trained[base] if base in trained else frozen[base]
        pool = self.past_policies
        if pool is not None and pool.past.adapter is None:
            pool.holder = frozen[id(base_of(pool.past.model))]

    # -- the run ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> Metrics:  # type: ignore[override]
        """Run all updates and return the last update's metrics.

        The folder ``args.output_dir`` then holds ``config.yaml``, the evaluations before and after training if there is
        an ``eval_task``, ``metrics.jsonl``, ``dialogues.jsonl``, the trained policies in ``final/``, and
        ``report.html``. The evaluations are :attr:`before` and :attr:`after`. A run that fails or is stopped leaves
        what it had and its report, and nothing if it had trained nothing.

        Args:
            resume_from_checkpoint: a checkpoint folder, or its name in ``args.output_dir``, or True for the newest
                whole checkpoint there. What the folder holds of later updates is renamed, and not lost.

        Raises:
            RunExists: the output folder holds another run.
            CheckpointError: no checkpoint exists to resume from, or the data have changed.
            FolderInUse: another process trains in the output folder.
            NonFiniteError: a reward, log-probability, value, loss or gradient is NaN or infinite.
            DeviceFailure: an accelerator failed or ran out of memory. The message names the newest checkpoint.
            Interrupted: the user pressed Ctrl-C. A checkpoint was saved.
            SystemExit: with status 143, after SIGTERM. A checkpoint was saved.
        """
        try:
            return super().train(resume_from_checkpoint, **kwargs)
        finally:
            self.progress.close()

    @contextmanager
    def training(self, resume_from_checkpoint: str | bool | None = None) -> Iterator[None]:
        """Begin a run or resume it, and end it on leaving (:meth:`trl_ext.trainer.loop.PPOLoop.training`).

        The processes of a ``backend`` end with it, unless you keep them (``with backend:``).
        """
        try:
            with super().training(resume_from_checkpoint):
                yield
        finally:
            self._ahead.drop()
            if self.backend is not None:
                self.backend.run_ended()

    def begin_run(self, resumes: bool) -> None:
        """Write the run's configuration, and evaluate the team before training."""
        if self.state.global_step:  # train() was called before
            if self.state.global_step < self.state.max_steps:
                distributed.on_main(self.set_results_aside)
            return
        with self.whole_weights() if self.record.config is None else nullcontext():  # only then weights are written
            self.record.begin(self._parts, self.team, self._engine_options, resumes)
        self.before = self.record.evaluate(BEFORE, self._evaluation)

    def end_run(self) -> None:
        """Save the trained team, evaluate it, and write the report."""
        self._ahead.drop()  # a callback may have ended the run early
        self.record.end(self.save_model)
        self.after = self.record.evaluate(AFTER, self._evaluation)
        self.record.report()

    def run_failed(self) -> None:
        """Leave what the run has, and its report."""
        self.record.failed()

    @property
    def _evaluation(self) -> Callable[[], list[Dialogue]] | None:
        return self.play_evaluation if self.eval_task is not None and self.args.eval_questions else None

    # -- the seams ----------------------------------------------------------------------------------------------------

    def next_batch(self, ahead: int = 0) -> TeamUpdateBatch:
        """Return the next update's batch, with this process's questions from the present task of the curriculum."""
        step = self.state.global_step
        number = step + 1 + ahead
        task = next((task for first, task in reversed(self.curriculum) if number >= first), self.task)
        examples: list[Example] = [task[i] for i in self.indices(len(task), ahead)]
        return TeamUpdateBatch(number, step, examples, task=task, plan=self.schedule.plan(number))

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

    def work_dropped(self) -> None:
        """Give up the dialogues that are played, and end the processes that sample, so that those that train can
        save."""
        self._ahead.drop()
        if self.backend is not None:
            self.backend.stop_sampling()

    def signal_heard(self) -> None:
        """Let no process that hangs keep the run from being saved."""
        if self.backend is not None:
            self.backend.end_hung()

    def how_to_resume(self) -> str:
        """Return the command that goes on with a run from a configuration, or the call that goes on with one from
        Python."""
        if self.record.config is None:
            return super().how_to_resume()
        return f"maporl train {shlex.quote(str(self.folder / CONFIG))} --resume"

    def score(self, batch: TeamUpdateBatch) -> TeamUpdateBatch:
        """Grade and score every answer, and assign credit to the utterances."""
        asked = [agent for source in self.player.scorer.sources.values() for agent in source.agents]
        judges = [p.name for agent in asked for p in self.team.policies_of.get(agent, ())]
        self.player.scorer.meet(batch.dialogues)
        try:
            with (
                self.learning.whole_weights(judges, self.references_sample),
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
                self._critic_outputs,
                self.args.critic_context,
                self.args.ratio == "trajectory",
            )
            batch.metrics |= self.untrained.measure(batch, tokenizers)
        together = torch.device("cpu") if self.args.placement == "split" else None
        metrics = self.advantages.fill(batch, self.learning, together)
        recorded = distributed.share_of_first(batch.dialogues, self.args.dialogues_logged)
        with self.player.interleaving.running():
            trace(batch, recorded, tokenizers, self.advantages.critics)
        batch.metrics |= self.named_metrics(metrics)
        return batch

    def finish_update(self, batch: TeamUpdateBatch, clock: Clock | None = None) -> None:
        """Send the new weights to the engines, let reward sources learn, and record the update."""
        with self.skippable():  # servers may not answer, and who ends needs no answers
            check()
            if not all(engine.between for engine in self.engines.values()):
                self._ahead.settle()  # an answer must not mix two sets of weights
            self.player.sync_engines(self.learners, self._whole_policy, batch.number)
        with self.player.interleaving.running():
            self._measure(batch)
        if batch.number == 1 and distributed.is_main():
            mention_no_calls(self.player.tools, batch.dialogues, batch.metrics)
        if self.past_policies is not None and self.past_policies.is_due(batch.number):
            with self._whole_policy(self.past_policies.policy.name):
                self.past_policies.take_snapshot()
        recorded = distributed.share_of_first(batch.dialogues, self.args.dialogues_logged)
        self.run.add_dialogues(batch.number, distributed.to_main(recorded))
        if distributed.is_main():
            record_verifiers(self.folder, batch.number, self.player.scorer.sources)
        super().finish_update(batch, clock)

    def _measure(self, batch: TeamUpdateBatch) -> None:
        """Add to the metrics what the dialogues, the sources, the engines and the tools have to tell."""
        if self.args.async_depth:
            batch.metrics |= staleness_metrics(batch.dialogues, batch.number)
            batch.metrics["async/in_progress"] = float(self._ahead.in_progress)
        evaluation = evaluate_everywhere(batch.dialogues)  # without labels it has the rewards already
        batch.metrics |= evaluation.metrics()
        batch.metrics |= evaluation.rewards or mean_rewards(distributed.all_gather(reward_sums(batch.dialogues)))
        for source in self.player.scorer.sources.values():
            batch.metrics |= source.after_update(batch.number, batch.dialogues, batch.task)
        for engine in self.engines.values():
            batch.metrics |= engine.metrics()
        batch.metrics |= {} if self.backend is None else self.backend.metrics()
        batch.metrics |= proposal_metrics(batch.dialogues) | verdict_metrics(batch.dialogues)
        batch.metrics |= tool_metrics(batch.dialogues, self.player.world, self.player.tools)

    # -- evaluating ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys=None, metric_key_prefix="eval") -> Metrics:
        """Play the first ``eval_questions`` of the evaluation split, and log accuracy by turn, votes and flips.

        If the questions have no labels, log the mean rewards instead. ``eval_dataset`` is a task, or rows with a
        prompt.
        """
        evaluation = self.measure(self._evaluated(eval_dataset))
        measured = evaluation.metrics() | evaluation.rewards
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self, task: Task | None = None) -> Evaluation:
        """Return the :class:`Evaluation` of the present weights without logging it. Random states do not change."""
        return evaluate_everywhere(self.play_evaluation(task))

    def play_evaluation(self, task: Task | None = None) -> list[Dialogue]:
        """Return the graded dialogues that :meth:`measure` measures. Each process plays its share of the questions.

        Raises:
            ValueError: the evaluation split is missing, or ``eval_questions`` is 0.
        """
        task, args = self._evaluated(task), self.args
        self._ahead.settle()  # an evaluation has the random state and the counts of tools to itself
        with self.sampling_weights():
            return self.player.play_evaluation(
                task, args.eval_questions, args.eval_decoding, args.seed, self.state.global_step + 1
            )

    def _evaluated(self, dataset: Task | Sequence[Mapping[str, Any]] | None) -> Task:
        """Return the task to evaluate on: ``dataset``, or that of the trainer."""
        task = self.eval_task if dataset is None else dataset
        if task is None:
            raise ValueError("evaluate: no evaluation split; pass eval_task to the trainer or a task here")
        return task if isinstance(task, Task) else Prompts(task, "eval")

    # -- logging and saving -------------------------------------------------------------------------------------------

    def named_metrics(self, metrics: dict[str, Metrics]) -> Metrics:
        """Return all metrics as one record, in which each name begins with the policy's name."""
        return {
            f"{policy}/{key}": value
            for policy, policy_metrics in metrics.items()
            for key, value in policy_metrics.items()
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write metrics to the run folder's ``metrics.jsonl`` and to the services in ``report_to``."""
        self.run.add_metrics(self.state.global_step, logs)
        super().log(logs, start_time)

    def save_learner_policy(self, name: str, folder: Path) -> None:
        """Save a policy in ``folder/name``, with a model card. Plain ``from_pretrained`` loads it."""
        self.learning.save_policy(name, below(folder, name))
        learner, args = self.learners[name], self.args
        facts = CardFacts(
            team=self.team.names(),
            protocol=self.player.protocol.label,
            task=type(self.task).__name__,
            updates=self.state.global_step,
            episodes=self.episodes,
            objective=args.objective,
            critic=learner.critic,
            kl_coef=args.kl_coef,
            cliprange=args.cliprange,
            learning_rate=learner.learning_rate,
        )
        write_model_card(below(folder, name), self.team.policies[name], facts)

    def remembering(self) -> dict[str, Remembers]:
        """Return the reward sources by name."""
        return dict(self.player.scorer.sources)

    def checkpoint_others(self) -> dict[str, Saved]:
        """Return the reward sources that learn, the central critic and the past policies, by name."""
        others: dict[str, Saved] = {
            name: source for name, source in self.player.scorer.sources.items() if source.learns
        }
        more = {"central_critic": self.learning.central, "opponents": self.past_policies}
        return others | {name: other for name, other in more.items() if other is not None}

    def checkpoint_state(self) -> dict:
        """Return the state of the loop, the running means of baselines, and which agents have had a credit."""
        more = {"baselines": dict(self.advantages.state.means), "credited": sorted(self.untrained.credited)}
        return super().checkpoint_state() | more

    def restore_state(self, state: dict) -> None:
        """Restore what :meth:`checkpoint_state` recorded."""
        super().restore_state(state)
        # older checkpoints lack these entries
        self.advantages.state.means = dict(state.get("baselines", {}))
        self.untrained.credited = set(state.get("credited", self.team.names()))
        self.run.go_on()

    def data_sets(self) -> dict[str, Task]:
        """Return the tasks of the run by split."""
        return tasks_by_name(self.task, self.eval_task, self.curriculum)

    def record_files(self) -> list[Path]:
        """Return the files of the run folder that have a record for each update."""
        return self.run.records

    def set_results_aside(self) -> list[Path]:
        """Rename the final weights of an earlier end of this run, and what was measured on them."""
        return self.run.set_results_aside()

    def must_be_new(self) -> None:
        """Check that the run folder holds no other run.

        Raises:
            RunExists: it holds another run's records.
            CheckpointError: it holds another run's checkpoints.
        """
        self.run.must_be_new()
        self.record.must_be_new()
        super().must_be_new()
