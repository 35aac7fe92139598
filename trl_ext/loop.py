"""The loop of PPO over any number of learners: what :class:`trl_ext.PPOv2Trainer` and trainers of teams share."""

import math
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
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
from trl_ext.losses import engine_gap
from trl_ext.metrics import Clock, Metrics, peak_memory, update_metrics
from trl_ext.multi_adapter import accumulate_together, groups_of
from trl_ext.ppov2_config import PPOv2Config
from trl_ext.prompts import shuffled_indices
from trl_ext.sharding import check_bases
from trl_ext.token_batch import Completion, TokenBatch, build_token_batch

COMPLETIONS = "completions.jsonl"


class PPOLoop(Trainer):
    """``train()`` is a loop over five seams, which subclasses fill in or replace:

        collect (prompts -> answers) -> score -> advantage (-> token rows) -> update -> log

    It is a ``transformers.Trainer`` for arguments, callbacks, logging, progress, the hub and model cards. What holds
    weights is a :class:`trl_ext.Learner`; ``learners`` has them by name.
    """

    args: Any  # a PPOv2Config, with its counts filled in
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    lr_scheduler: Any

    def _begin(
        self, learners: dict[str, Learner], args: PPOv2Config, train_dataset, eval_dataset, optimizers, callbacks
    ):
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
        self.episodes = 0
        self.ahead = 0
        """How many updates sampling is ahead of training."""

    def place(self) -> dict[int, torch.device]:
        """Devices by ``id`` of the base model; models without one are on the accelerator's."""
        return {}

    # -- the loop --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> Metrics:  # type: ignore[override]
        """Run all updates and return the last update's metrics.

        ``resume_from_checkpoint``: a checkpoint folder, or True for the newest in ``args.output_dir``.
        """
        self._start_or_resume(resume_from_checkpoint)
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
            answers = self.collected()
        with clock("score"):
            answers = self.score(answers)
            everybody = distributed.all_gather_lists(answers)
        with clock("advantage"):
            rows, metrics = self.advantage(answers, everybody)
        interruptions.droppable = False
        with clock("update"):
            self.collect_ahead()
            metrics |= self.update(rows)
        self._finish_update(everybody, rows, metrics, clock)
        return metrics

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

    # -- seams -----------------------------------------------------------------------------------------------------------

    def next_batch(self) -> list[Any]:
        """This process's examples of this update."""
        raise NotImplementedError

    def collect(self, batch: list[Any]) -> list[Any]:
        """Sample answers to ``batch`` from the current policies."""
        raise NotImplementedError

    def score(self, answers: list[Any]) -> list[Any]:
        """Give every answer its scalar score."""
        raise NotImplementedError

    def advantage(
        self, answers: list[Any], everybody: list[Any] | None = None
    ) -> tuple[dict[str, TokenBatch], Metrics]:
        """Token rows with old log-probabilities, values, advantages and returns, per learner; and statistics.

        ``answers`` are this process's, ``everybody`` those of all processes, over which statistics go (default: the same).
        """
        raise NotImplementedError

    def collected(self) -> list[Any]:
        """What was sampled for this update: now, unless a subclass has done it ahead."""
        with self.whole_weights():
            return self.collect(self.next_batch())

    def collect_ahead(self) -> None:
        """Begin to sample for the next update while this one goes on; here, where the same weights sample, nothing."""

    def _sample_generations(self) -> None:
        """Write answers for people to read, where a subclass has any."""

    def update(self, rows: dict[str, TokenBatch]) -> Metrics:
        """``num_ppo_epochs`` passes; in each, ``num_mini_batches`` optimizer steps of every learner."""
        args = self.args
        collected: dict[str, list[Metrics]] = {name: [] for name in rows}
        going = set(rows)
        for epoch in range(args.num_ppo_epochs):
            cuts = {name: self._minibatches(r, epoch) for name, r in rows.items()}
            for number in range(args.num_mini_batches):
                stepping = [name for name in cuts if name in going and self._anything(cuts[name][number])]
                for name, measures in self._accumulated(rows, {name: cuts[name][number] for name in stepping}).items():
                    collected[name].append(measures)
                for name in stepping:  # every loss first, then every step
                    collected[name][-1]["grad_norm"] = self.learners[name].step()
                    if args.target_kl is not None and collected[name][-1]["approx_kl"] > args.target_kl:
                        going.discard(name)
        rate = float(self.lr_scheduler.get_last_lr()[0])
        with warnings.catch_warnings():  # torch warns of a policy that had nothing to learn from yet
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for learner in self.learners.values():
                learner.scheduler.step()
        merged = {name: update_metrics(entries) for name, entries in collected.items()}
        if args.target_kl is not None:
            for name in merged:
                merged[name]["policy/stopped_early"] = float(name not in going)
        return self._merge(merged) | {"lr": rate}

    # -- pieces the seams share ------------------------------------------------------------------------------------------

    def _indices(self, size: int) -> list[int]:
        """Which of ``size`` examples this process works on in this update."""
        own = self.args.local_batch_size
        first = self.episodes + self.ahead * self.args.batch_size
        everybody = shuffled_indices(size, self.args.seed, first, self.args.batch_size)
        return everybody[distributed.rank() * own : (distributed.rank() + 1) * own]

    def _annotated(
        self, answers: Mapping[str, Sequence[Completion]]
    ) -> tuple[dict[str, TokenBatch], dict[str, Metrics]]:
        """Token rows with old log-probabilities and values, per learner; and statistics."""
        rows, metrics = {}, {}
        for name, own in answers.items():
            learner = self.learners[name]
            device = learner.device
            rows[name] = build_token_batch(list(own), learner.tokenizer.pad_token_id or 0, device)
            metrics[name] = learner.compute_old_logprobs_and_values(rows[name])
            off, lean, tokens = distributed.all_reduce_sum(engine_gap(rows[name]), device)
            if tokens:
                metrics[name] |= {"policy/engine_gap": off / tokens, "policy/engine_kl": lean / tokens}
            metrics[name]["val/num_eos_tokens"] = distributed.all_reduce_sum(
                [float(sum(a.ended for a in own))], device
            )[0]
        return rows, metrics

    def _merge(self, metrics: dict[str, Metrics]) -> Metrics:
        """Metrics of several learners in one flat record; here there is one learner and nothing to tell apart."""
        return dict(next(iter(metrics.values()), {}))

    def _accumulated(self, rows: dict[str, TokenBatch], minibatch: dict[str, torch.Tensor]) -> dict[str, Metrics]:
        """Every learner's gradient of its minibatch; those of one base together where ``joint_adapters`` asks for it."""
        index = {name: own.to(rows[name].input_ids.device) for name, own in minibatch.items()}
        alone = [name for name in index if not self.args.joint_adapters or self.learners[name].has_forward(rows[name])]
        groups = [[name] for name in alone] + groups_of(self.learners, [name for name in index if name not in alone])
        found: dict[str, Metrics] = {}
        for group in groups:
            if len(group) == 1:
                found[group[0]] = self.learners[group[0]].accumulate(rows[group[0]], index[group[0]])
            else:
                found |= accumulate_together(self.learners, rows, {name: index[name] for name in group})
        return found

    def _anything(self, index: torch.Tensor) -> bool:
        """Whether any process has rows in a minibatch."""
        return distributed.all_reduce_max(len(index), self.accelerator.device) > 0

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Every process sees the whole weights of all learners, for generating and saving; all processes enter together."""
        with ExitStack() as stack:
            for learner in self.learners.values():
                stack.enter_context(learner.strategy.whole())
            yield

    def _minibatches(self, rows: TokenBatch, epoch: int) -> list[torch.Tensor]:
        """A seeded permutation of the families of ``rows`` cut into ``num_mini_batches`` parts of nearly equal size."""
        members: dict[int, list[int]] = {}
        for row, family in enumerate(rows.family.tolist()):
            members.setdefault(family, []).append(row)
        together = list(members.values())
        order = np.random.default_rng([self.args.seed, self.state.global_step, epoch]).permutation(len(together))
        parts = np.array_split(order, self.args.num_mini_batches)
        return [torch.tensor([row for i in part for row in together[i]], dtype=torch.long) for part in parts]

    def _finish_update(self, answers: Any, rows: dict[str, TokenBatch], metrics: Metrics, clock: "Clock") -> None:
        """Count, log, evaluate and save, as the callbacks ask for."""
        self.state.global_step += 1
        self.episodes += self.args.batch_size
        self.state.epoch = self.episodes / len(self.train_dataset)
        metrics["episode"] = self.episodes
        metrics["memory/peak"] = peak_memory(self.accelerator.device)
        metrics |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
        sampled = float(sum(int(r.action_mask.sum()) for r in rows.values()))
        metrics["tokens_per_second"] = distributed.all_reduce_sum([sampled], self.accelerator.device)[0] / max(
            clock.total(), 1e-9
        )
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log(dict(metrics))
        self._sample_generations()
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # -- saving and resuming ---------------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict:
        """What a checkpoint records besides weights and optimizers; subclasses add to it."""
        return {"format": 1, "global_step": self.state.global_step, "episodes": self.episodes, "seed": self.args.seed}

    def checkpoint_others(self) -> dict[str, Saved]:
        """What else a checkpoint holds, by name; subclasses add to it."""
        return {}

    def restore_state(self, state: dict) -> None:
        """Inverse of :meth:`checkpoint_state`."""
        self.state.global_step, self.episodes = state["global_step"], state["episodes"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Each policy as a ``from_pretrained`` folder: ``output_dir`` itself for one, ``output_dir/NAME`` for several."""
        folder = Path(output_dir or self.folder)
        with self.whole_weights():
            for name in self.learners if distributed.is_main() else ():
                self._save_policy(name, folder)
        distributed.barrier()

    def _save_policy(self, name: str, folder: Path) -> None:
        save_policy(self.learners[name], folder if len(self.learners) == 1 else folder / name)

    def _save_checkpoint(self, model, trial) -> None:
        target = self._checkpoint_folder()
        write_checkpoint(target, self.learners, self.checkpoint_state(), self.checkpoint_others())
        if distributed.is_main():
            remove_old(self.folder, self.args.save_total_limit)

    def _checkpoint_folder(self) -> Path:
        return self.folder / f"checkpoint-{self.state.global_step}"

    def _start_or_resume(self, wanted: str | bool | None) -> None:
        args = self.args
        self.state.max_steps = args.num_total_batches
        self.state.num_train_epochs = math.ceil(args.total_episodes / len(self.train_dataset))
        self.state.compute_steps(args, self.state.max_steps)
        self.state.train_batch_size = args.per_device_train_batch_size
        existing = list_checkpoints(self.folder)
        if not wanted:
            if (self.folder / COMPLETIONS).exists() and self.state.global_step == 0:
                raise CheckpointError(
                    f"{args.output_dir}: holds {COMPLETIONS} of an earlier run, which would be mixed up with this one's; "
                    "choose another output_dir"
                )
            if existing and self.state.global_step == 0:
                raise CheckpointError(
                    f"{args.output_dir}: holds {existing[-1].name} of an earlier run, which would be mixed up with this "
                    "one; pass resume_from_checkpoint=True to go on with it, or choose another output_dir"
                )
            return
        if wanted is True and not existing:
            raise CheckpointError(f"{args.output_dir}: no whole checkpoint to resume from; start without resuming")
        folder = newest_whole(existing) if wanted is True else Path(wanted)
        state = read_checkpoint(folder, self.learners, self.checkpoint_others())
        if state["seed"] != args.seed:
            raise CheckpointError(f"{folder}: was made with seed {state['seed']}, this run has seed {args.seed}")
        self.restore_state(state)


@contextmanager
def _no_gradient_checkpointing(args: PPOv2Config):
    wanted, args.gradient_checkpointing = args.gradient_checkpointing, False
    try:
        yield
    finally:
        args.gradient_checkpointing = wanted
