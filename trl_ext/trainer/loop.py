"""The loop of PPO over any number of learners. :class:`trl_ext.PPOv2Trainer` and trainers of teams share it."""

import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_ext.errors import UserError, short_trace
from trl_ext.files.atomic import replace_file
from trl_ext.files.checkpoints import list_checkpoints, numbered_checkpoints
from trl_ext.files.lock import RunLock
from trl_ext.files.paths import below
from trl_ext.learning.audit import AUDIT, LEARNER, Audit, Built, Finding, Promise, VoidRun, Watch, audit
from trl_ext.learning.checkpoint import RandomState, random_state, set_random_state, write_checkpoint
from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.learners import Home
from trl_ext.learning.metrics import Clock, Metrics
from trl_ext.process import distributed
from trl_ext.process.devices import reuse_memory
from trl_ext.process.interruptions import Interruptions
from trl_ext.process.messages import tell
from trl_ext.process.random_states import shuffled_indices
from trl_ext.process.waits import Discarded, check
from trl_ext.trainer.resuming import Resuming
from trl_ext.trainer.update_batch import UpdateBatch

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", bound=UpdateBatch)


class PPOLoop(Resuming, Trainer, Generic[Batch]):
    """A trainer whose ``train()`` passes one :class:`trl_ext.trainer.update_batch.UpdateBatch` through five seams:

        next_batch -> collect -> score -> advantage -> update -> finish_update

    It is a ``transformers.Trainer`` for its arguments, callbacks, logging, progress bar, hub upload and model cards.
    :class:`trl_ext.learning.learners.Learning` holds the weights. ``learners`` has the learners by name.

    A subclass calls :meth:`setup` in its constructor. It defines :meth:`next_batch`, :meth:`collect`, :meth:`score` and
    :meth:`advantage`. Where the weights are is decided by the :class:`trl_ext.learning.learners.Home` that it sets up
    with. It may override these hooks: :meth:`collected`, :meth:`inform_samplers`, :meth:`finish_update`,
    :meth:`log_completions`, :meth:`named_metrics`, :meth:`save_learner_policy`, :meth:`checkpoint_state`,
    :meth:`restore_state`, :meth:`checkpoint_others`, :meth:`data_sets`, :meth:`record_files`, :meth:`built`,
    :meth:`begin_run`, :meth:`end_run`, :meth:`run_failed`, :meth:`work_dropped`, :meth:`how_to_resume`,
    :meth:`set_results_aside` and :meth:`must_be_new`.
    """

    _interruptions: Interruptions | None = None
    """What hears signals while :meth:`train` runs."""
    _fails_together = False
    """Whether all processes have heard that one of them failed."""
    args: Any  # a PPOv2Config; setup fills in its batch counts
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    lr_scheduler: Any

    def setup(
        self,
        home: Home,
        args: PPOv2Config,
        train_dataset: Any,
        eval_dataset: Any,
        callbacks: list[TrainerCallback] | None,
    ) -> None:
        """Set up ``transformers.Trainer``, the batch sizes, the devices and every learner's optimizer.

        Args:
            home: has the learners, and starts what trains them.
            args: the trainer's arguments.
            train_dataset: the data set to train on, or a task.
            eval_dataset: the data set to evaluate on, or a task.
            callbacks: further ``TrainerCallback`` objects.

        Raises:
            ValueError: the batch sizes do not fit each other, or a method is overridden that nothing calls.
            WorldError: the processes are not those that the launcher started, or adapters of one base would be sharded.
        """
        _check_overrides(type(self))
        self.home, self.learners = home, home.learners
        self.folder = Path(str(args.output_dir))
        first = next(iter(self.learners.values()))
        with _no_gradient_checkpointing(args):  # each learner turns it on for its own models
            super().__init__(
                model=first.model,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=first.tokenizer,
                data_collator=cast(Any, list),
                callbacks=callbacks,
            )
        unset_hf_deepspeed_config()  # Trainer sets it, and from_pretrained would then shard what it loads
        distributed.check_launcher()
        if self.accelerator.device.type == "cpu":
            reuse_memory()
        updates = args.count_batches(distributed.size(), len(train_dataset))
        self.learning = home.start(args, self.accelerator, updates)
        self.optimizer, self.lr_scheduler = first.optimizer, first.scheduler
        self.episodes = 0
        self.watch = Watch(self.promises)
        self._made = 0
        """The number of the last update that was made. finish_update has counted it if global_step is not below."""

    # -- the loop -----------------------------------------------------------------------------------------------------

    @short_trace
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> Metrics:  # type: ignore[override]
        """Run all updates and return the last update's metrics.

        Args:
            resume_from_checkpoint: a checkpoint folder, or its name in ``args.output_dir``, or True for the newest
                whole checkpoint there. What the folder holds of later updates is renamed, and not lost.

        Raises:
            CheckpointError: no checkpoint exists to resume from, or the output folder holds another run, or the data or
                the options have changed.
            FolderInUse: another process trains in the output folder.
            NonFiniteError: a reward, log-probability, value, loss or gradient is NaN or infinite.
            DeviceFailure: an accelerator failed or ran out of memory. The message names the newest checkpoint.
            Interrupted: the user pressed Ctrl-C. A checkpoint was saved.
            SystemExit: with status 143, after SIGTERM. A checkpoint was saved.
        """
        metrics: Metrics = {}
        with self._signals_heard() as interruptions, self.training(resume_from_checkpoint):
            while self.goes_on():
                before = (self.checkpoint_state(), random_state())
                interruptions.nothing_to_lose = self._all_is_saved()
                try:
                    metrics = self._one_update(before)
                except Discarded:
                    set_random_state(before[1])
                    self._end_early(before[0])
                if distributed.all_reduce_max(interruptions.asked, self.accelerator.device):
                    self._end_early(self.checkpoint_state())
        return metrics

    @contextmanager
    def _signals_heard(self) -> Iterator[Interruptions]:
        try:
            with Interruptions(self.home.end_hung) as self._interruptions:
                yield self._interruptions
        finally:
            self._interruptions = None

    @contextmanager
    def training(self, resume_from_checkpoint: str | bool | None = None) -> Iterator[None]:
        """Begin a run or resume it, and end it on leaving. :meth:`train` is a loop in it, and so may yours be.

        No other process can train in the output folder meanwhile. The argument and the errors are those of
        :meth:`train`.

        Raises:
            CheckpointError: no checkpoint exists to resume from, or the output folder holds another run, or the data or
                the options have changed.
            FolderInUse: another process trains in the output folder.
            DeviceFailure: an accelerator failed or ran out of memory.
            RuntimeError: the last update was not finished.
        """
        lock = RunLock(self.folder)
        distributed.on_main(lock.acquire)
        try:
            with self._dropped_alone():
                self.start_or_resume(resume_from_checkpoint)
            self._made = self.state.global_step
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            yield
            if self._made > self.state.global_step:
                raise RuntimeError("training: the last update was not finished; call finish_update after update")
            self.finish_checkpoint()
            self.load_best()
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self.record_audit()
            with self._dropped_alone():
                self.end_run()
        except (Exception, KeyboardInterrupt) as error:
            if distributed.size() == 1:  # others may be elsewhere, and would not come to finish it
                self.finish_checkpoint()
            if self.state.global_step:
                with suppress(OSError):  # the disk may be what failed
                    self.record_audit()
            self.run_failed()
            if (failure := device_failure(error, self.folder, self.state.global_step)) is not None:
                raise failure from error
            raise
        finally:
            lock.release()
            self.work_dropped()
            self.home.run_ended()

    def goes_on(self) -> bool:
        """Return whether the run has updates left, and no callback has ended it."""
        return self.state.global_step < self.state.max_steps and not self.control.should_training_stop

    def _one_update(self, before: tuple[dict, RandomState]) -> Metrics:
        clock = Clock()
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        with self._saved_if_it_fails(*before), self.droppable() if distributed.size() == 1 else nullcontext():
            with clock("collect"):
                batch = self.collected()
            with clock("score"):
                batch = self.score(batch)
            with clock("advantage"):
                batch = self.advantage(batch)
        with clock("update"):
            batch = self.update(batch)
        if self._interruptions is not None:
            self._interruptions.nothing_to_lose = False
        self._made = self.state.global_step + 1  # also where an override of update() makes the whole of it
        self.finish_update(batch, clock)
        return batch.metrics

    @contextmanager
    def _saved_if_it_fails(self, state: dict, random: RandomState) -> Iterator[None]:
        """Save the state after the last complete update if the block, which changes no weights, ends in an error that
        the user can mend, such as a server that is gone. Several processes do it where all have heard of the error."""
        try:
            yield
        except UserError as error:
            if (distributed.size() == 1 or self._fails_together) and self.state.global_step:
                try:
                    set_random_state(random)
                    error.add_note(self._save_last_update(state))
                except UserError as other:
                    error.add_note(f"the state after the last complete update was not saved: {other}")
            raise

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Let a signal to :meth:`train` drop what the block does, which this process can do again and does by itself.

        Processes that train together all come here. They drop it together, and hear of an error of one of them that a
        user can mend.

        Raises:
            Discarded: a signal has come, to this process or another one.
            UserError: what the block raised, here or in another process.
        """
        if self._interruptions is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        ended: BaseException | None = None
        try:
            with self._interruptions.droppable():
                yield
        except (Discarded, UserError) as error:
            ended = error
        worst = distributed.all_reduce_max((ended is not None) + isinstance(ended, UserError), self.accelerator.device)
        if worst:
            self._fails_together = worst > 1
            elsewhere = UserError("another process failed, and says why") if worst > 1 else Discarded()
            raise ended if isinstance(ended, UserError) else elsewhere

    @contextmanager
    def skippable(self) -> Iterator[None]:
        """Let a signal to :meth:`train` skip the rest of the block, where a single process trains.

        The run ends afterwards.
        """
        if self._interruptions is None or distributed.size() > 1:
            yield
            return
        # where the signal has come before, the block begins, because a generator must yield, and its first check() ends
        # it
        with suppress(Discarded), self._interruptions.droppable(at_once=False):
            yield

    @contextmanager
    def _dropped_alone(self) -> Iterator[None]:
        """Let a signal end a run of one process in the block, before its first update or after its last one."""
        if self._interruptions is None or distributed.size() > 1:
            yield
            return
        try:
            with self._interruptions.droppable():
                yield
        except Discarded:
            self._end_early(self.checkpoint_state(), between=False)

    def _all_is_saved(self) -> bool:
        return not self.state.global_step or (self._saving is None and self._checkpoint_folder().exists())

    def _end_early(self, state: dict, between: bool = True) -> None:
        """Save the state after the last complete update, and end the process."""
        # between: training has begun, and the callbacks have not been told of its end
        assert self._interruptions is not None, "train() has made it"
        told = self._save_last_update(state)
        self._interruptions.nothing_to_lose = True
        if between:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        number = distributed.all_reduce_max(self._interruptions.asked, self.accelerator.device)
        self._interruptions.asked = self._interruptions.asked or number
        if distributed.is_main():
            tell(f"{self._interruptions.name}: {told}")
        raise self._interruptions.error

    def _save_last_update(self, state: dict) -> str:
        """Save the state after the last complete update, and return how far the run is and how it goes on."""
        self.work_dropped()
        self.home.stop_sampling()
        self.finish_checkpoint()
        target, step = self._checkpoint_folder(), self.state.global_step
        if step and not distributed.broadcast_from_main(target.exists()):
            write_checkpoint(target, self.learning, state, self.checkpoint_others())
        checkpoints = [target] if step else numbered_checkpoints(self.folder)
        where = f"saved in {checkpoints[-1]}" if checkpoints else "saved nothing yet, because no update was complete"
        return f"stopped after update {step} of {self.state.max_steps}; {where}; to go on: {self.how_to_resume()}"

    def how_to_resume(self) -> str:
        """Hook: return the command, or the call, that goes on with the run."""
        return "train(resume_from_checkpoint=True)" if self.state.global_step else "train()"

    def work_dropped(self) -> None:
        """Hook: the run ends, after its last update or before it.

        Give up what is going on in the background, so that the run can be saved. By default this does nothing.
        """

    # -- seams --------------------------------------------------------------------------------------------------------

    def next_batch(self, ahead: int = 0) -> Batch:
        """Return the batch of the next update, with the examples of this process.

        ``ahead`` asks for the batch so many updates later.
        """
        raise NotImplementedError

    def collect(self, batch: Batch) -> Batch:
        """Sample completions of the examples from the current policies."""
        raise NotImplementedError

    def score(self, batch: Batch) -> Batch:
        """Give every completion its score."""
        raise NotImplementedError

    def advantage(self, batch: Batch) -> Batch:
        """Fill in ``token_batches``, with old log-probabilities, values, advantages and returns, and add statistics.

        A batch holds what this process sampled. Statistics are over all processes.
        """
        raise NotImplementedError

    def update(self, batch: Batch) -> Batch:
        """Train every learner on its token batch, and add statistics to the metrics.

        Raises:
            RuntimeError: a step of the loop was left out before this one.
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        self._check_order(batch)
        metrics, rate = self.learning.update(batch.token_batches, self.state.global_step)
        batch.count(metrics)
        batch.metrics |= self.named_metrics(metrics) | {"lr": rate}
        self._made = self.state.global_step + 1
        return batch

    def _check_order(self, batch: Batch) -> None:
        """Check that ``batch`` is that of the next update, and that the last update was finished."""
        number = self.state.global_step + 1
        if self._made == number:
            raise RuntimeError(f"update: update {number} is made, and not finished; call finish_update(batch) after it")
        if 0 < self.state.max_steps < number:  # its learning rate may be 0
            raise RuntimeError(f"update: all {self.state.max_steps} updates are made; raise total_episodes to go on")
        if batch.number != number:
            raise RuntimeError(
                f"update: expected the batch of update {number}, got that of update {batch.number}; next_batch() and "
                "collected() return a new one for each update"
            )

    def finish_update(self, batch: Batch, clock: Clock | None = None) -> None:
        """Hook: count the update, then log, evaluate and save where the callbacks ask for it.

        ``clock`` has measured the update. An override ends with ``super().finish_update``.

        Raises:
            RuntimeError: the update was not made.
        """
        if self._made <= self.state.global_step:
            raise RuntimeError("finish_update: no update was made since the last one; call update(batch) before it")
        self.state.global_step += 1
        self.episodes += self.args.batch_size
        self.state.epoch = self.episodes / (len(self.train_dataset) * self.args.num_generations)
        metrics = batch.metrics
        metrics["episode"] = self.episodes
        metrics["threads"] = torch.get_num_threads()
        metrics["memory/peak"] = self.learning.peak_memory()
        metrics |= self.home.metrics()
        if clock is not None:
            metrics |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
            sampled = float(sum(int(rows.sampled_mask.sum()) for rows in batch.token_batches.values()))
            sampled = distributed.all_reduce_sum([sampled], self.accelerator.device)[0]
            metrics["tokens_per_second"] = sampled / max(clock.total(), 1e-9)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        found = list(self.watch.add(self._facts, batch.counts))
        if self.control.should_log:
            self.log(dict(metrics))
        self.log_completions()
        if self.control.should_evaluate:
            with self.skippable():
                check()
                self.note_best(self.evaluate())
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
        else:
            self.finish_checkpoint(wait=False)
        self._tell(found)

    def _tell(self, found: Sequence[Finding]) -> None:
        """Warn of what the last updates have shown.

        Raises:
            VoidRun: nothing can come of the run, and ``on_void`` is "stop". The state after this update is saved.
        """
        void = [finding for finding in found if finding.severity == "void" and self.args.on_void == "stop"]
        for finding in found if distributed.is_main() else ():
            if finding not in void:
                logger.warning("audit: %s", finding)
        if void:
            error = VoidRun(f"update {self.state.global_step}: nothing can come of this run: {void[0]}")
            error.add_note(self._save_last_update(self.checkpoint_state()))
            error.add_note("training.on_void: warn goes on all the same")
            raise error

    # -- hooks --------------------------------------------------------------------------------------------------------

    def collected(self) -> Batch:
        """Hook: return the batch of this update with its completions. A subclass may have sampled it ahead."""
        with self.sampling_weights():
            return self.collect(self.next_batch())

    def inform_samplers(self) -> None:
        """Hook: let what samples from copies of the weights, such as a server, take over the present ones, unless it
        has them.

        All processes call this together, whenever completions are about to be sampled. By default this does nothing.
        """

    promises: Sequence[Promise] = LEARNER
    """The table by which the run is audited."""

    def built(self) -> Built:
        """Hook: return the facts of the built parts, as the run is audited by them."""
        raise NotImplementedError

    @cached_property
    def _facts(self) -> Built:
        """What :meth:`built` has returned, because built parts stay as they are from update to update."""
        return self.built()

    @property
    def audit(self) -> Audit:
        """Return what the run did so far, against what its parts promise."""
        return audit(self.built(), self.watch.total, self.promises)

    def record_audit(self) -> None:
        """Write the audit of the run so far into its folder."""
        step, most = self.state.global_step, self.state.max_steps
        note = f"after update {step} of {most}" if step < most else ""
        if distributed.is_main():  # the others need not come here: where a run fails, they may be elsewhere
            replace_file(self.folder / AUDIT, json.dumps(replace(self.audit, note=note).to_json(), indent=1))

    def end_run(self) -> None:
        """Hook: all updates are made, and the output folder is still locked. By default this does nothing."""

    def run_failed(self) -> None:
        """Hook: an error or Ctrl-C ends the run before its end. By default this does nothing."""

    def log_completions(self) -> None:
        """Hook: write completions for people to read. By default this writes nothing."""

    def named_metrics(self, metrics: dict[str, Metrics]) -> Metrics:
        """Hook: return all learners' metrics as one flat record. By default there is one learner."""
        return dict(next(iter(metrics.values()), {}))

    def save_learner_policy(self, name: str, folder: Path) -> None:
        """Hook: save one learner's policy: a single one in ``folder`` itself, others in ``folder/name``."""
        self.learning.save_policy(name, folder if len(self.learners) == 1 else below(folder, name))

    # -- pieces that seams share --------------------------------------------------------------------------------------

    def indices(self, size: int, ahead: int = 0) -> list[int]:
        """Return which of ``size`` examples this process works on in the next update, or ``ahead`` updates later.

        All ``num_generations`` completions of an example are sampled in one process.
        """
        each = self.args.num_generations
        count = self.args.local_batch_size // each
        first = (self.episodes + ahead * self.args.batch_size) // each
        batch = shuffled_indices(size, self.args.seed, first, self.args.batch_size // each)
        return batch[distributed.rank() * count : (distributed.rank() + 1) * count]

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Give every process the whole weights of all policies, to sample or to save. All processes enter together."""
        with self.learning.whole_weights():
            yield

    @contextmanager
    def sampling_weights(self) -> Iterator[None]:
        """Give every process the weights to sample with, in the precision of the training forward (``bf16``).

        All processes enter together. What samples from copies of the weights has them from here on.
        """
        self.inform_samplers()
        sampled_here = self.home.sampled_here()
        with self.learning.whole_weights(sampled_here, self.home.references_sample), self.learning.autocast():
            yield

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save each policy as a ``from_pretrained`` folder.

        A single policy goes into ``output_dir`` itself. Several go into ``output_dir/NAME``.
        """
        folder = Path(output_dir or self.folder)
        for name in self.learners:  # memory need not hold the whole weights of several policies
            with self.learning.whole_weights([name]):
                if distributed.is_main():
                    self.save_learner_policy(name, folder)
        distributed.barrier()


def _check_overrides(kind: type) -> None:
    """Check that a subclass overrides no method of ``transformers.Trainer`` that only that trainer's own loop calls."""
    for name in ("compute_loss", "training_step", "create_optimizer", "create_scheduler", "get_train_dataloader"):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if owner is not Trainer:
            raise ValueError(
                f"{owner.__name__}.{name}: nothing would call it; override collect, score, advantage or update, which "
                "are the steps of this loop (docs/howto/ppo.md), or pass optimizers="
            )


@contextmanager
def _no_gradient_checkpointing(args: PPOv2Config):
    wanted, args.gradient_checkpointing = args.gradient_checkpointing, False
    try:
        yield
    finally:
        args.gradient_checkpointing = wanted


class DeviceFailure(UserError, RuntimeError):
    """An accelerator failed or ran out of memory during a run. The process cannot go on, and a new one can resume."""


def device_failure(error: BaseException, folder: Path, updates: int) -> DeviceFailure | None:
    """Return what to tell the user of an ``error`` that came from a device, or None for any other error.

    A device that disappears and a kernel that fails are one to the process: every later call to the device fails too.

    Args:
        error: what was raised.
        folder: the output folder, whose newest checkpoint is named.
        updates: the number of updates that were complete.
    """
    full = isinstance(error, torch.OutOfMemoryError)
    if not full and not (isinstance(error, RuntimeError) and re.match("(CUDA|HIP|XPU|MPS|NPU) error", str(error))):
        return None
    what = " ".join(str(error).split("\n", 1)[0].split())
    saved = list_checkpoints(folder)
    again = "in a new process, go on from it with --resume, or train(resume_from_checkpoint=True)"
    last = (
        f"its newest checkpoint is {saved[-1]}; {again}"
        if saved
        else "it has no checkpoint; set save_steps to have some"
    )
    less = (
        "; set a lower max_tokens_per_microbatch or local_rollout_forward_batch_size, or gradient_checkpointing"
        if full
        else ""
    )
    return DeviceFailure(f"{folder}: the device failed after {updates} complete updates ({what}{less}); {last}")
