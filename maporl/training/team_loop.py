"""The loop of a team's run: what is evaluated, written and saved around its updates, and how it resumes."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from maporl.errors import refuse
from maporl.evaluation.metrics import Evaluation
from maporl.evaluation.tables import audit_table, evaluation_table, learned
from maporl.report.audit import TEAM
from maporl.report.metric_panels import bar_text, what_matters_first
from maporl.rollout.player import Player, evaluate_everywhere
from maporl.storage.run_folder import RunFolder
from maporl.tasks.base import Task, tasks_by_name
from maporl.tasks.counts import count_data, totals
from maporl.tasks.prompts import Prompts
from maporl.team.past_policies import PastPolicies
from maporl.team.saving import write_model_card
from maporl.team.team import Team
from maporl.text import printable
from maporl.training import ahead
from maporl.training.ahead import Ahead
from maporl.training.assign import TeamAdvantages
from maporl.training.check import by_role
from maporl.training.home import TeamHome
from maporl.training.learns_from import facts_of, learner_lines
from maporl.training.parts import RunParts
from maporl.training.run_record import AFTER, BEFORE, CONFIG, RunRecord
from maporl.training.samples import TeamUpdateBatch
from maporl.training.untrained import UntrainedCounter
from maporl.types import Dialogue
from trl_ext.errors import short_trace
from trl_ext.files.paths import below
from trl_ext.learning.audit import Built, learner_facts
from trl_ext.learning.checkpoint import Saved
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Metrics
from trl_ext.process import distributed
from trl_ext.trainer.loop import PPOLoop
from trl_ext.trainer.resuming import Remembers


class TeamProgress(TrainerCallback):
    """Shows the updates, the accuracy of each turn, the reward, sampled tokens per second and the time left."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar on the main process."""
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="update", dynamic_ncols=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the metrics of an update. The metrics of an evaluation are not shown."""
        if self.bar is not None and logs and "tokens_per_second" in logs:  # only updates have this metric
            self.bar.set_postfix_str(bar_text(logs), refresh=False)

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar to the present update."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def close(self) -> None:
        """Close the bar, so that what is printed next begins a line."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class TeamLoop(PPOLoop[TeamUpdateBatch]):
    """A :class:`trl_ext.trainer.loop.PPOLoop` over a team, without the steps of an update.

    :class:`maporl.MultiAgentPPOTrainer` makes what is named here, and defines the steps.
    """

    parts: RunParts
    team: Team
    task: Task
    eval_task: Task | None
    record: RunRecord
    player: Player
    advantages: TeamAdvantages
    untrained: UntrainedCounter
    past_policies: PastPolicies | None
    before: Evaluation | None = None
    after: Evaluation | None = None
    progress: TeamProgress
    data: Mapping[str, Any] = {}
    """What was counted of the questions, on the main process."""
    nobody_asked: str | None = None
    """Why a program asked no agent in the last update, if it asked none."""
    _ahead: Ahead[TeamUpdateBatch]

    @property
    def run(self) -> RunFolder:
        """Return the files to which each update adds a record."""
        return self.record.run

    @contextmanager
    def undone_if_it_fails(self, home: TeamHome) -> Iterator[None]:
        """End the backend's processes and empty the run's new folder, if the block fails."""
        try:
            yield
        except BaseException:
            home.run_ended()
            self.record.failed()
            raise

    def check_roles(self) -> None:
        """Check that the gradients of roles are in this process, if they are to be measured.

        Raises:
            ConfigError: they are elsewhere. The message says where.
        """
        here = isinstance(self.learning, Learning)
        whole = here and not any(learner.strategy.sharded for learner in self.learners.values())
        refuse(by_role(self.args.role_gradients, self.args.balance, whole, distributed.size()), "trainer")

    def check_ahead(self) -> None:
        """Check that dialogues can be played ahead, if they are to be.

        Raises:
            ConfigError: they cannot. The message says why.
        """
        if not self.args.async_depth:
            return
        engines = {agent.engine: self.player.engines[agent.engine] for agent in self.team.agents.values()}
        faults = ahead.faults(
            self.args.async_depth,
            {name: engine.remote for name, engine in engines.items()},
            {name: engine.between for name, engine in engines.items()},
            self.parts.asks_untrained,
            all(learner.args.compares_sampler for learner in self.learners.values()),
            self.past_policies is not None,
            distributed.size(),
        )
        refuse(faults, "trainer")

    def show_progress(self) -> None:
        """Show a progress bar of the team in place of that of ``transformers.Trainer``."""
        self.progress = TeamProgress()
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)
        if not self.args.disable_tqdm:
            self.add_callback(self.progress)

    # -- the run ------------------------------------------------------------------------------------------------------

    @short_trace
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Metrics:  # type: ignore[override]
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
            metrics = super().train(resume_from_checkpoint, **kwargs)
            held_out = {} if self.after is None else self.after.metrics()
            return what_matters_first(metrics | {f"eval_{name}": value for name, value in held_out.items()})
        finally:
            self.progress.close()

    def begin_run(self, resumes: bool) -> None:
        """Write the run's configuration, and evaluate the team before training."""
        if self.state.global_step:  # train() was called before
            if self.state.global_step < self.state.max_steps:
                distributed.on_main(self.set_results_aside)
            return
        with self.whole_weights() if self.record.config is None else nullcontext():  # only then weights are written
            self.record.begin(self.parts, resumes, self.learns_from)
        if distributed.is_main():
            asked, later = self.args.eval_questions, self.parts.curriculum
            self.data = totals(count_data(self.task, self.eval_task if asked else None, asked, later))
        self.record_audit()
        self.args.sections = distributed.on_main(self.record.sections)
        if self._tells:
            print(*map(printable, self.learns_from), sep="\n", flush=True)
        self.before = self.record.evaluate(BEFORE, self._evaluation)
        if self.before is not None:
            self.best_metric(self.before.metrics())

    def end_run(self) -> None:
        """Save the trained team, evaluate it, and write the report."""
        self._ahead.drop()  # a callback may have ended the run early
        self.record.end(self.save_model)
        self.after = self.record.evaluate(AFTER, self._evaluation)
        self.record.report()
        if self._tells:
            self.progress.close()
            if self.after is not None:
                Console(markup=False, highlight=False).print(
                    evaluation_table(self.after, self.before, ("before", "after"))
                )
                print(printable(learned(self.before, self.after)))
            done = self.audit
            Console(markup=False, highlight=False).print(audit_table(done))
            print(*map(printable, done.lines()), sep="\n")
            print(f"report: {printable(str(self.record.folder / 'report.html'))}", flush=True)

    @property
    def _tells(self) -> bool:
        """Whether it is said here what a run learns and has learned: the command line does so for its own runs."""
        return self.record.config is None and not self.args.disable_tqdm and distributed.is_main()

    def run_failed(self) -> None:
        """Leave what the run has, and its report."""
        self.record.failed()

    @property
    def _evaluation(self) -> Callable[[], list[Dialogue]] | None:
        return self.play_evaluation if self.eval_task is not None and self.args.eval_questions else None

    promises = TEAM

    @property
    def learns_from(self) -> list[str]:
        """Return in plain sentences what the built run learns from (:mod:`maporl.training.learns_from`)."""
        return self.parts.learns_from(self.built()["learner"])

    def built(self) -> Built:
        """Return the facts of the built team: its learners, agents, sources of reward, tools, program and task."""
        parts, player, world = self.parts, self.player, self.player.world
        policies, policies_of, roles = self.team.policies, self.team.policies_of, parts.learning_roles()
        learners = {
            name: facts_of(
                learner_facts(learner, learner.args),
                policies[name].agents,
                policies[name].adapter is not None,
                learner.args,
                {key: getattr(learner.args, key) for key in policies[name].algorithm.of_policy},
                parts.advantages,
                player.sampling,
                roles,
            )
            for name, learner in self.learners.items()
        }
        agents = {
            name: {
                "learns": any(policy.name in self.learners for policy in policies_of.get(name, ())),
                "ends": self.args.stop_token != "none",
                "why": self.nobody_asked,
            }
            for name in player.speakers
        }
        program: dict[str, dict] = {"the program": {}} if player.protocol.runs_program else {}
        return {
            "run": {"the run": {"why": self.nobody_asked}},
            "task": {"the task": {"name": self.task.name, "questions": len(self.task), **self.data}},
            "program": program,
            "agent": agents,
            "learner": learners,
            "service": self.home.facts(),
            "source": {name: {"weight": weight} for name, weight in parts.reward.sources.items()},
            "tool": {name: {} for name in (*world.tools, *(n for n, e in world.environments.items() if e.agents))},
        }

    def how_to_resume(self) -> str:
        """Return the command that goes on with a run from a configuration, or the call that goes on with one from
        Python."""
        if self.record.config is None:
            return super().how_to_resume()
        return f"maporl train {shlex.quote(str(self.folder / CONFIG))} --resume"

    def work_dropped(self) -> None:
        """Give up the dialogues that are played."""
        self._ahead.drop()

    # -- evaluating ---------------------------------------------------------------------------------------------------

    @short_trace
    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys=None, metric_key_prefix="eval") -> Metrics:
        """Play the first ``eval_questions`` of the evaluation split, and log accuracy by turn, votes, flips and mean
        rewards.

        If the questions have no labels, log the mean rewards alone. ``eval_dataset`` is a task, or rows with a prompt.
        """
        measured = self.measure(self._evaluated(eval_dataset)).metrics()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self, task: Task | None = None) -> Evaluation:
        """Return the :class:`Evaluation` of the present weights without logging it. Random states do not change."""
        return evaluate_everywhere(self.play_evaluation(task))

    def play_evaluation(self, task: Task | None = None) -> list[Dialogue]:
        """Return the scored dialogues that :meth:`measure` measures. Each process plays its share of the questions.

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
        """Write metrics to the run folder's ``metrics.jsonl``, with the counts of the audit, and to the services in
        ``report_to``."""
        counts = self.watch.logged() if "episode" in logs else {}  # an evaluation counts nothing
        self.run.add_metrics(self.state.global_step, logs | counts)
        super().log(logs, start_time)

    def save_learner_policy(self, name: str, folder: Path) -> None:
        """Save a policy in ``folder/name``, with a model card. Plain ``from_pretrained`` loads it."""
        self.learning.save_policy(name, below(folder, name))
        write_model_card(
            below(folder, name),
            self.team.policies[name],
            team=", ".join(self.team.names()),
            protocol=self.player.protocol.label,
            task=type(self.task).__name__,
            updates=self.state.global_step,
            dialogues=int(self.watch.total["run/the run/dialogues"]),
            learned=learner_lines({name: self.built()["learner"][name]})[0],
            audit="\n- ".join(self.audit.lines()),
            cliprange=self.learners[name].args.cliprange,
        )

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
        more = {"baselines": self.advantages.means, "credited": sorted(self.untrained.credited)}
        return super().checkpoint_state() | more

    def algorithms(self) -> dict[str, Any]:
        """Return what decides the weights of learners and is not the team's, with the advantages of agents."""
        advantages = {name: agent.learns_by.advantage for name, agent in self.team.agents.items()}
        own = {f"{name}.advantage": values for name, values in advantages.items() if values}
        return json.loads(json.dumps(super().algorithms() | own, default=str))

    def restore_state(self, state: dict) -> None:
        """Restore what :meth:`checkpoint_state` recorded."""
        super().restore_state(state)
        self.advantages.means = state["baselines"]
        self.untrained.credited = set(state["credited"])
        self.run.go_on()

    def forget_samplers(self) -> None:
        """Let the engines take over the weights before they sample."""
        self.player.forget_versions()

    def data_sets(self) -> dict[str, Task]:
        """Return the tasks of the run by split."""
        return tasks_by_name(self.task, self.eval_task, self.parts.curriculum)

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
