"""The loop of PPO over any number of learners: what :class:`trl_ext.PPOv2Trainer` and trainers of teams share."""

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from transformers import Trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_ext import distributed
from trl_ext.allocator import reuse_memory
from trl_ext.checkpoint import (
    CheckpointError,
    Saved,
    list_checkpoints,
    newest_whole,
    random_state,
    read_checkpoint,
    remove_old,
    save_policy,
    set_random_state,
    write_checkpoint,
)
from trl_ext.forward import base_of
from trl_ext.interruptions import Discarded, Interrupted, Interruptions
from trl_ext.learner import Learner
from trl_ext.learning import Learning
from trl_ext.metrics import Clock, Metrics, peak_memory
from trl_ext.ppov2_config import PPOv2Config
from trl_ext.prompts import shuffled_indices
from trl_ext.sharding import check_bases
from trl_ext.update_batch import UpdateBatch

COMPLETIONS = "completions.jsonl"

Batch = TypeVar("Batch", bound=UpdateBatch)


class PPOLoop(Trainer, Generic[Batch]):
    """``train()`` is a loop over five seams, which exchange one :class:`trl_ext.update_batch.UpdateBatch`:

        next_batch -> collect -> score -> advantage -> update -> finish_update

    It is a ``transformers.Trainer`` for arguments, callbacks, logging, progress, the hub and model cards. What holds weights is
    :class:`trl_ext.learning.Learning`; ``learners`` has the learners by name.

    A subclass calls :meth:`setup` in its constructor and defines :meth:`next_batch`, :meth:`collect`, :meth:`score` and
    :meth:`advantage`. It may override the hooks, each of which says what it is for: :meth:`place`, :meth:`collected`,
    :meth:`collect_ahead`, :meth:`finish_update`, :meth:`log_completions`, :meth:`named_metrics`, :meth:`save_learner_policy`,
    :meth:`checkpoint_state`, :meth:`restore_state`, :meth:`checkpoint_others` and :meth:`start_or_resume`.
    """

    args: Any  # a PPOv2Config, with its counts filled in
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    lr_scheduler: Any

    def setup(
        self, learners: dict[str, Learner], args: PPOv2Config, train_dataset, eval_dataset, optimizers, callbacks
    ) -> None:
        """Everything a trainer of any number of learners needs: Trainer's own set-up, batch sizes, optimizers."""
        self.learners = learners
        self.folder = Path(str(args.output_dir))
        first = next(iter(learners.values()))
        with _no_gradient_checkpointing(args):  # each learner turns it on for itself
            super().__init__(
                model=first.model,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=first.tokenizer,
                data_collator=cast(Any, list),
                callbacks=callbacks,
            )
        unset_hf_deepspeed_config()  # Trainer sets it: whatever is loaded from here on is whole, too
        distributed.check_launcher()
        if self.accelerator.device.type == "cpu":
            reuse_memory()
        check_bases({name: learner.model for name, learner in learners.items()}, self.accelerator)
        updates = args.count_batches(distributed.size(), len(train_dataset))
        places = self.place()
        for learner in learners.values():
            optimizer, scheduler = optimizers if learner is first else (None, None)
            learner.prepare(self.accelerator, updates, optimizer, scheduler, places.get(id(base_of(learner.model))))
        self.optimizer, self.lr_scheduler = first.optimizer, first.scheduler
        self.learning = Learning(learners, args, self.accelerator.device)
        self.episodes = 0

    def place(self) -> dict[int, torch.device]:
        """Hook: devices by ``id`` of the base model; models without one are on the accelerator's."""
        return {}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> Metrics:  # type: ignore[override]
        """Run all updates and return the last update's metrics.

        ``resume_from_checkpoint``: a checkpoint folder, or True for the newest in ``args.output_dir``.

        Raises:
            CheckpointError: there is nothing to resume from, or the output folder holds another run.
            NonFiniteError: a reward, log-probability, value, loss or gradient is NaN or infinite.
        """
        self.start_or_resume(resume_from_checkpoint)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        metrics: Metrics = {}
        with Interruptions() as interruptions:
            while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
                before = (self.checkpoint_state(), random_state())
                try:
                    metrics = self._one_update(interruptions)
                except Discarded:
                    set_random_state(before[1])
                    self._end_early(interruptions.asked, before[0])
                if asked := distributed.all_reduce_max(interruptions.asked, self.accelerator.device):
                    self._end_early(asked, self.checkpoint_state())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return metrics

    def _one_update(self, interruptions: Interruptions) -> Metrics:
        clock = Clock()
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        interruptions.droppable = distributed.size() == 1  # several processes have to agree, at the end of an update
        with clock("collect"):
            batch = self.collected()
        with clock("score"):
            batch = self.score(batch)
        with clock("advantage"):
            batch = self.advantage(batch)
        interruptions.droppable = False
        with clock("update"):
            self.collect_ahead()
            batch = self.update(batch)
        self.finish_update(batch, clock)
        return batch.metrics

    def _end_early(self, asked: int, state: dict) -> None:
        """Save what the last whole update left, and end: SIGTERM with exit status 0, Ctrl-C as Ctrl-C."""
        target, name = self._checkpoint_folder(), signal.Signals(asked).name
        if self.state.global_step and not distributed.broadcast_from_main(target.exists()):
            write_checkpoint(target, self.learners, state, self.checkpoint_others())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        where = (
            f"in {target}; to go on: --resume, or train(resume_from_checkpoint=True)"
            if self.state.global_step
            else "nothing yet: there was no update"
        )
        if distributed.is_main():
            print(f"{name}: stopped after update {self.state.global_step}; saved {where}", file=sys.stderr, flush=True)
        raise SystemExit(0) if asked == signal.SIGTERM else Interrupted

    # -- seams --------------------------------------------------------------------------------------------------------

    def next_batch(self, ahead: int = 0) -> Batch:
        """The batch of the next update, or of the one ``ahead`` updates after it, with this process's examples."""
        raise NotImplementedError

    def collect(self, batch: Batch) -> Batch:
        """Sample completions of the examples from the current policies."""
        raise NotImplementedError

    def score(self, batch: Batch) -> Batch:
        """Give every completion its scalar score."""
        raise NotImplementedError

    def advantage(self, batch: Batch) -> Batch:
        """Fill in ``token_batches``, with old log-probabilities, values, advantages and returns, and statistics of them.

        A batch has what this process sampled; statistics are over all processes.
        """
        raise NotImplementedError

    def update(self, batch: Batch) -> Batch:
        """Train every learner on its token batch, and add what was measured to the metrics."""
        metrics, rate = self.learning.update(batch.token_batches, self.state.global_step)
        batch.metrics |= self.named_metrics(metrics) | {"lr": rate}
        return batch

    def finish_update(self, batch: Batch, clock: Clock) -> None:
        """Hook: count, log, evaluate and save, as the callbacks ask for; an override ends with ``super().finish_update``."""
        self.state.global_step += 1
        self.episodes += self.args.batch_size
        self.state.epoch = self.episodes / len(self.train_dataset)
        metrics = batch.metrics
        metrics["episode"] = self.episodes
        metrics["memory/peak"] = peak_memory(self.accelerator.device)
        metrics |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
        sampled = float(sum(int(rows.sampled_mask.sum()) for rows in batch.token_batches.values()))
        sampled = distributed.all_reduce_sum([sampled], self.accelerator.device)[0]
        metrics["tokens_per_second"] = sampled / max(clock.total(), 1e-9)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log(dict(metrics))
        self.log_completions()
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def collected(self) -> Batch:
        """Hook: the batch of this update with its completions; sampled now, unless a subclass has sampled it ahead."""
        with self.whole_weights():
            return self.collect(self.next_batch())

    def collect_ahead(self) -> None:
        """Hook: begin to sample for the next update while this one goes on. By default, where the same weights sample, nothing."""

    def log_completions(self) -> None:
        """Hook: write completions for people to read, where a subclass has any."""

    def named_metrics(self, metrics: dict[str, Metrics]) -> Metrics:
        """Hook: the metrics of all learners as one flat record. By default there is one learner and nothing to tell apart."""
        return dict(next(iter(metrics.values()), {}))

    def save_learner_policy(self, name: str, folder: Path) -> None:
        """Hook: save the policy of one learner below ``folder``: there itself if it is alone, else under its name."""
        save_policy(self.learners[name], folder if len(self.learners) == 1 else folder / name)

    # -- pieces that seams share --------------------------------------------------------------------------------------

    def indices(self, size: int, ahead: int = 0) -> list[int]:
        """Which of ``size`` examples this process works on in the next update, or in the one ``ahead`` updates after it."""
        own = self.args.local_batch_size
        first = self.episodes + ahead * self.args.batch_size
        everybody = shuffled_indices(size, self.args.seed, first, self.args.batch_size)
        return everybody[distributed.rank() * own : (distributed.rank() + 1) * own]

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Every process sees the whole weights of all learners, for generating and saving; all processes enter together."""
        with self.learning.whole_weights():
            yield

    # -- saving and resuming ------------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict:
        """Hook: what a checkpoint records besides weights and optimizers; an override adds to it."""
        return {"format": 1, "global_step": self.state.global_step, "episodes": self.episodes, "seed": self.args.seed}

    def checkpoint_others(self) -> dict[str, Saved]:
        """Hook: what else a checkpoint holds, by name."""
        return {}

    def restore_state(self, state: dict) -> None:
        """Hook: inverse of :meth:`checkpoint_state`; an override begins with ``super().restore_state``."""
        self.state.global_step, self.episodes = state["global_step"], state["episodes"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Each policy as a ``from_pretrained`` folder: ``output_dir`` itself for one, ``output_dir/NAME`` for several."""
        folder = Path(output_dir or self.folder)
        with self.whole_weights():
            for name in self.learners if distributed.is_main() else ():
                self.save_learner_policy(name, folder)
        distributed.barrier()

    def _save_checkpoint(self, model, trial) -> None:
        target = self._checkpoint_folder()
        write_checkpoint(target, self.learners, self.checkpoint_state(), self.checkpoint_others())
        if distributed.is_main():
            remove_old(self.folder, self.args.save_total_limit)

    def _checkpoint_folder(self) -> Path:
        return self.folder / f"checkpoint-{self.state.global_step}"

    def start_or_resume(self, wanted: str | bool | None) -> None:
        """Hook: count the updates of the run, and put a checkpoint in place where one is ``wanted`` (a folder, or True: the newest).

        Raises:
            CheckpointError: there is none, it is of another run, or the output folder holds what would be mixed up with this run.
        """
        args = self.args
        self.state.max_steps = args.num_total_batches
        self.state.num_train_epochs = math.ceil(args.total_episodes / len(self.train_dataset))
        self.state.compute_steps(args, self.state.max_steps)
        self.state.train_batch_size = args.per_device_train_batch_size
        existing = list_checkpoints(self.folder)
        if not wanted:
            self._check_new(existing)
            return
        if wanted is True and not existing:
            raise CheckpointError(f"{args.output_dir}: no whole checkpoint to resume from; start without resuming")
        folder = newest_whole(existing) if wanted is True else Path(wanted)
        state = read_checkpoint(folder, self.learners, self.checkpoint_others())
        if state["seed"] != args.seed:
            raise CheckpointError(f"{folder}: was made with seed {state['seed']}, this run has seed {args.seed}")
        self.restore_state(state)

    def _check_new(self, checkpoints: list[Path]) -> None:
        """Raise where a run that starts would be mixed up with an earlier one."""
        if self.state.global_step:
            return
        if (self.folder / COMPLETIONS).exists():
            raise CheckpointError(
                f"{self.args.output_dir}: holds {COMPLETIONS} of an earlier run, which would be mixed up with this one's; "
                "choose another output_dir"
            )
        if checkpoints:
            raise CheckpointError(
                f"{self.args.output_dir}: holds {checkpoints[-1].name} of an earlier run, which would be mixed up with this "
                "one; pass resume_from_checkpoint=True to go on with it, or choose another output_dir"
            )


@contextmanager
def _no_gradient_checkpointing(args: PPOv2Config):
    wanted, args.gradient_checkpointing = args.gradient_checkpointing, False
    try:
        yield
    finally:
        args.gradient_checkpointing = wanted
