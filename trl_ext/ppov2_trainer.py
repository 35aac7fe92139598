"""PPOv2 for one policy, on current TRL and transformers: the trainer that TRL removed in 1.13, maintained.

``train()`` is a loop over five seams, each of which a subclass may replace:

    collect (prompts -> answers) -> score -> advantage (-> token rows) -> update -> log

It is a ``transformers.Trainer`` for arguments, callbacks, logging, progress, the hub and model cards. What holds
weights is a :class:`trl_ext.Learner`.
"""

import json
import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.trainer import disable_dropout_in_model

from trl_ext import world
from trl_ext.advantages import assign_advantages
from trl_ext.allocator import reuse_memory
from trl_ext.chat import Tokenizer
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
from trl_ext.data import Prompt, check_dataset, read_prompt, rows_of, shuffled_indices
from trl_ext.forward import base_of
from trl_ext.generation import Sampling, sample, stop_ids_of
from trl_ext.interruptions import Discarded, Interrupted, Interruptions
from trl_ext.joint import accumulate_together, groups_of
from trl_ext.learner import Learner
from trl_ext.losses import engine_gap
from trl_ext.measures import Clock, Metrics, mean, update_metrics
from trl_ext.merging import merged, merges
from trl_ext.ppov2_config import PPOv2Config
from trl_ext.rows import Answer, Everyones, TokenRows, build_rows
from trl_ext.scoring import ModelReward, RewardFunction, call_reward_functions, weighted_scores
from trl_ext.strategies import check_bases

COMPLETIONS = "completions.jsonl"


class PPOv2Trainer(Trainer):
    """Proximal policy optimisation of one causal language model.

    Constructor-compatible with ``trl.experimental.ppo.PPOTrainer`` of TRL 1.12; the differences are additions:

    Args:
        args: a :class:`PPOv2Config`.
        processing_class: the policy's tokenizer; its padding token may equal its EOS token.
        model: the policy: a causal LM, or a trainable ``PeftModel``.
        ref_model: the reference of the KL penalty; None: adapters off for PEFT, else a frozen copy.
        reward_model: a sequence-classification model with one output; optional where ``reward_funcs`` are given.
        train_dataset: rows with ``input_ids``, ``prompt`` (text or messages) or ``messages``; other columns reach the
            reward functions.
        value_model: a critic of its own (sequence classification); None: ``args.critic`` decides, by default a head
            on the policy's trunk.
        data_collator: applied to the list of rows of one batch, where rows need work; returns rows, or a padded batch
            with an attention mask (``DataCollatorWithPadding``).
        eval_dataset: rows for ``evaluate()``.
        peft_config: wraps ``model`` in a new adapter.
        reward_funcs: one or several ``f(prompts, completions, **columns) -> list[float | None]``, plain or async.
        reward_weights: one weight per source, in the order reward model, functions; default 1.
        reward_processing_class: the reward model's tokenizer where it differs from the policy's.
    """

    args: Any  # a PPOv2Config, with its counts filled in
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    lr_scheduler: Any

    def __init__(
        self,
        args: PPOv2Config,
        processing_class: Tokenizer,
        model: PreTrainedModel | PeftModel,
        ref_model: PreTrainedModel | None = None,
        reward_model: nn.Module | None = None,
        train_dataset: Sequence[dict] | None = None,
        value_model: nn.Module | None = None,
        data_collator: Callable[[list[dict]], Any] | None = None,
        eval_dataset: Sequence[dict] | None = None,
        optimizers: tuple = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        reward_weights: Sequence[float] | None = None,
        reward_processing_class: Tokenizer | None = None,
    ):
        check_dataset(train_dataset, "train_dataset")
        if reward_model is None and reward_funcs is None:
            raise ValueError("a source of reward is missing: pass reward_funcs (functions) or reward_model")
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        self._reward_functions = _as_list(reward_funcs)
        self._reward_model: Any = None
        if reward_model is not None:
            disable_dropout_in_model(reward_model)
            self._reward_model = ModelReward(
                reward_model, reward_processing_class, args.local_rollout_forward_batch_size
            )
        self._reward_weights = _weights(reward_weights, len(self._reward_functions) + (reward_model is not None))
        learner = Learner(
            "policy",
            model,
            processing_class,
            args,
            critic="model" if value_model is not None else args.critic,
            value_model=value_model,
            adapter=args.model_adapter_name,
            reference=ref_model,
            ref_adapter=args.ref_adapter_name,
        )
        self._collate = data_collator or list
        self._begin({"policy": learner}, args, train_dataset, eval_dataset, optimizers, callbacks)
        if self._reward_model is not None:
            self._reward_model.model.to(self.accelerator.device)
        self._stop_ids = stop_ids_of(learner.model, processing_class, args.stop_token, args.stop_token_id)

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
        world.check()
        if self.accelerator.device.type == "cpu":
            reuse_memory()
        check_bases({name: learner.model for name, learner in learners.items()}, self.accelerator)
        updates = args.count_batches(world.size(), len(train_dataset))
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

    # -- the loop -------------------------------------------------------------------------------------------------

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
                if asked := world.largest(interruptions.asked, self.accelerator.device):
                    self._end_early(asked, self.checkpoint_state())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return metrics

    def _one_update(self, interruptions: Interruptions) -> Metrics:
        clock = Clock()
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        interruptions.droppable = world.size() == 1  # several processes have to agree, at the end of an update
        with clock("collect"):
            answers = self.collected()
        with clock("score"):
            answers = self.score(answers)
            everybody = world.everyones(answers)
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
        if self.state.global_step and not world.from_main(target.exists()):
            write_checkpoint(target, self.learners, state, self.checkpoint_others())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        where = (
            f"in {target}; go on with it by resuming" if self.state.global_step else "nothing yet: there was no update"
        )
        if world.is_main():
            print(f"{name}: stopped after update {self.state.global_step}; saved {where}", file=sys.stderr, flush=True)
        raise SystemExit(0) if asked == signal.SIGTERM else Interrupted

    def collected(self) -> list[Any]:
        """What was sampled for this update: now, unless a subclass has done it ahead."""
        with self.whole_weights():
            return self.collect(self.next_batch())

    def collect_ahead(self) -> None:
        """Begin to sample for the next update while this one goes on; here, where the same weights sample, nothing."""

    def next_batch(self) -> list[Any]:
        """This process's rows of this update, in seeded order without replacement within an epoch."""
        return [self.train_dataset[i] for i in self._indices(len(self.train_dataset))]

    def _indices(self, size: int) -> list[int]:
        """Which of ``size`` examples this process works on in this update."""
        own = self.args.local_batch_size
        first = self.episodes + self.ahead * self.args.batch_size
        everybody = shuffled_indices(size, self.args.seed, first, self.args.batch_size)
        return everybody[world.rank() * own : (world.rank() + 1) * own]

    def collect(self, batch: list[Any]) -> list[Any]:
        """Sample one answer per row from the current policy."""
        return self._answer(batch, self.args.temperature)

    def score(self, answers: list[Any]) -> list[Any]:
        """Give every answer its scalar score; the named parts are kept in ``self.rewards``."""
        named: dict[str, list[float | None]] = {}
        prompts: list[Prompt] = [a.prompt for a in answers]
        if self._reward_model is not None:
            named["reward_model"] = list(self._score_by_model(answers))
        if self._reward_functions:
            columns = {key: [p.columns.get(key) for p in prompts] for key in prompts[0].columns}
            named |= call_reward_functions(
                self._reward_functions, [p.prompt for p in prompts], [a.text for a in answers], columns
            )
        scores = weighted_scores(named, self._reward_weights)
        penalty = self.args.missing_eos_penalty
        for answer, score in zip(answers, scores, strict=True):
            answer.score = score - (penalty if penalty is not None and not answer.ended else 0.0)
        self.rewards = named
        return answers

    def advantage(self, answers: list[Any], everybody: list[Any] | None = None) -> tuple[dict[str, TokenRows], Metrics]:
        """Token rows with old log-probabilities, values, advantages and returns, per learner; and statistics.

        ``answers`` are this process's, ``everybody`` those of all processes, over which statistics go (default: the same).
        """
        rows, metrics = self._annotated({"policy": answers})
        has_critic = self.learners["policy"].critic != "none"
        everyones = Everyones.of(rows["policy"])
        metrics["policy"] |= assign_advantages(everyones.rows, self.args, has_critic)
        return {"policy": everyones.back(rows["policy"])}, self._merge(metrics)

    def update(self, rows: dict[str, TokenRows]) -> Metrics:
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

    # -- pieces the seams share -----------------------------------------------------------------------------------

    def _answer(self, batch: list[dict], temperature: float) -> list[Answer]:
        learner = self.learners["policy"]
        prompts = [read_prompt(row, learner.tokenizer) for row in rows_of(self._collate(batch))]
        self._check_lengths(prompts)
        sampling = Sampling(
            self.args.response_length,
            temperature,
            self._stop_ids,
            self.args.local_rollout_forward_batch_size,
            batch_tokens=self.args.max_tokens_per_generate,
        )
        first = self.episodes + world.rank() * self.args.local_batch_size
        keys = [(self.args.seed, first + number) for number in range(len(prompts))]
        joined = merges(learner.model, learner.adapter) and self.accelerator.device.type == "cpu"
        with merged(learner.model, learner.adapter) if joined else learner.active() as model:
            found = sample(model, [p.ids for p in prompts], learner.tokenizer.pad_token_id or 0, sampling, keys)
        return [
            Answer(
                prompt_ids=prompt.ids,
                response_ids=one.ids,
                ended=one.ids[-1] in self._stop_ids,
                sampled_logprobs=one.logprobs,
                label=f"update {self.state.global_step + 1}, answer {number}",
                prompt=prompt,
                text=learner.tokenizer.decode(one.ids, skip_special_tokens=True),
            )
            for number, (prompt, one) in enumerate(zip(prompts, found, strict=True))
        ]

    def _check_lengths(self, prompts: list[Prompt]) -> None:
        """Raise if a prompt and its answer cannot fit the model's context."""
        config = base_of(self.learners["policy"].model).config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        longest = max(prompts, key=lambda p: len(p.ids))
        if context is not None and len(longest.ids) + self.args.response_length > context:
            raise ValueError(
                f"a prompt has {len(longest.ids)} tokens and answers may have {self.args.response_length} (response_length), "
                f"but the model reads at most {context}; shorten the prompt or the answers: {longest.prompt!r:.80}"
            )

    def _score_by_model(self, answers: list[Answer]) -> list[float]:
        reward = self._reward_model
        if reward.tokenizer is None:
            return reward.score_ids([a.prompt_ids + a.response_ids for a in answers])
        tokenizer = self.learners["policy"].tokenizer
        return reward.score_texts([tokenizer.decode(a.prompt_ids, skip_special_tokens=True) + a.text for a in answers])

    def _annotated(self, answers: Mapping[str, Sequence[Answer]]) -> tuple[dict[str, TokenRows], dict[str, Metrics]]:
        """Token rows with old log-probabilities and values, per learner; and statistics."""
        rows, metrics = {}, {}
        for name, own in answers.items():
            learner = self.learners[name]
            device = learner.device
            rows[name] = build_rows(list(own), learner.tokenizer.pad_token_id or 0, device)
            metrics[name] = learner.annotate(rows[name])
            off, lean, tokens = world.total(engine_gap(rows[name]), device)
            if tokens:
                metrics[name] |= {"policy/engine_gap": off / tokens, "policy/engine_kl": lean / tokens}
            metrics[name]["val/num_eos_tokens"] = world.total([float(sum(a.ended for a in own))], device)[0]
        return rows, metrics

    def _merge(self, metrics: dict[str, Metrics]) -> Metrics:
        """Metrics of several learners in one flat record; here there is one learner and nothing to tell apart."""
        return dict(next(iter(metrics.values()), {}))

    def _accumulated(self, rows: dict[str, TokenRows], minibatch: dict[str, torch.Tensor]) -> dict[str, Metrics]:
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
        return world.largest(len(index), self.accelerator.device) > 0

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Every process sees the whole weights of all learners, for generating and saving; all processes enter together."""
        with ExitStack() as stack:
            for learner in self.learners.values():
                stack.enter_context(learner.strategy.whole())
            yield

    def _minibatches(self, rows: TokenRows, epoch: int) -> list[torch.Tensor]:
        """A seeded permutation of the families of ``rows`` cut into ``num_mini_batches`` parts of nearly equal size."""
        members: dict[int, list[int]] = {}
        for row, family in enumerate(rows.family.tolist()):
            members.setdefault(family, []).append(row)
        together = list(members.values())
        order = np.random.default_rng([self.args.seed, self.state.global_step, epoch]).permutation(len(together))
        parts = np.array_split(order, self.args.num_mini_batches)
        return [torch.tensor([row for i in part for row in together[i]], dtype=torch.long) for part in parts]

    def _finish_update(self, answers: Any, rows: dict[str, TokenRows], metrics: Metrics, clock: "Clock") -> None:
        """Count, log, evaluate and save, as the callbacks ask for."""
        self.state.global_step += 1
        self.episodes += self.args.batch_size
        self.state.epoch = self.episodes / len(self.train_dataset)
        metrics["episode"] = self.episodes
        metrics |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
        sampled = float(sum(int(r.action_mask.sum()) for r in rows.values()))
        metrics["tokens_per_second"] = world.total([sampled], self.accelerator.device)[0] / max(clock.total(), 1e-9)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log(dict(metrics))
        self._sample_generations()
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, ignore_keys=None, metric_key_prefix="eval") -> Metrics:
        """Mean of every reward source over greedy answers to the evaluation set; the weights do not change."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        check_dataset(dataset, "eval_dataset")
        own = [dataset[i] for i in range(world.rank(), len(dataset), world.size())]
        with self.whole_weights():
            answers = self.score(self._answer(own, temperature=0.0)) if own else []
        answers = world.everyones(answers)
        found = world.gather(self.rewards if own else {})
        rewards = {name: [v for part in found for v in part.get(name, [])] for name in found[0]}
        metrics = {f"{metric_key_prefix}_{name}": mean(values) for name, values in rewards.items()}
        metrics[f"{metric_key_prefix}_score"] = mean([a.score for a in answers])
        metrics[f"{metric_key_prefix}_ended"] = mean([float(a.ended) for a in answers])
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _sample_generations(self) -> None:
        """Write greedy answers to the evaluation set, ``num_sample_generations`` times in a run."""
        times = self.args.num_sample_generations
        every = max(1, self.args.num_total_batches // times) if times > 0 else 0
        if self.eval_dataset is None or not every or (self.state.global_step - 1) % every:
            return
        with self.whole_weights():
            answers = self._answer([self.eval_dataset[i] for i in range(len(self.eval_dataset))], temperature=0.0)
        if not world.is_main():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / COMPLETIONS).open("a", encoding="utf-8") as file:
            for answer in answers:
                record = {"step": self.state.global_step, "prompt": answer.prompt.prompt, "completion": answer.text}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def generate_completions(self, sampling: bool = False) -> list[str]:
        """Answers to the evaluation set, greedy unless ``sampling``; kept for scripts written for TRL."""
        check_dataset(self.eval_dataset, "eval_dataset")
        rows = [self.eval_dataset[i] for i in range(len(self.eval_dataset))]
        return [a.text for a in self._answer(rows, self.args.temperature if sampling else 0.0)]

    # -- saving and resuming --------------------------------------------------------------------------------------

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
            for name, learner in self.learners.items() if world.is_main() else ():
                save_policy(learner, folder if len(self.learners) == 1 else folder / name)
        world.wait()

    def _save_checkpoint(self, model, trial) -> None:
        target = self._checkpoint_folder()
        write_checkpoint(target, self.learners, self.checkpoint_state(), self.checkpoint_others())
        if world.is_main():
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


def _as_list(functions) -> list[RewardFunction]:
    if functions is None:
        return []
    return list(functions) if isinstance(functions, (list, tuple)) else [functions]


def _weights(weights: Sequence[float] | None, sources: int) -> list[float]:
    if weights is not None and len(weights) != sources:
        raise ValueError(f"reward_weights: expected {sources} numbers, one per source, got {len(weights)}")
    return [1.0] * sources if weights is None else [float(w) for w in weights]
