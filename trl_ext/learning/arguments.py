"""What the trainer does with each of the ``TrainingArguments`` of transformers, and which options a resumed run may
change."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from trl_ext.files.manifest import CheckpointError
from trl_ext.models.liger import check_liger
from trl_ext.ppo.options import DefaultRate

DECIDING = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16"),
)
"""The arguments that decide the weights of a run. A resumed run must have the same."""

NOT_COMPILED = (
    "compiling takes minutes and saved a tenth of an update on a CPU (docs/performance.md), so the trainer does not "
    "compile"
)

REFUSED = {
    "auto_find_batch_size": "lower per_device_train_batch_size and raise gradient_accumulation_steps, or set "
    "max_tokens_per_microbatch",
    "batch_eval_metrics": "evaluations have no compute_metrics",
    "bf16_full_eval": "evaluations sample in the precision of training, bf16",
    "data_seed": "seed decides the order of the data too",
    "debug": "a loss or a gradient that is not finite always stops the run",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "eval_on_start": "call trainer.evaluate() before trainer.train()",
    "fp16_full_eval": "evaluations sample in the precision of training, bf16",
    "ignore_data_skip": "a resumed run goes on with the data where it stopped",
    "include_for_metrics": "evaluations have no compute_metrics",
    "include_num_input_tokens_seen": "tokens_per_second is logged",
    "label_smoothing_factor": "PPO has no labels",
    "neftune_noise_alpha": "PPO's ratios need the log-probabilities of the weights without noise",
    "restore_callback_states_from_checkpoint": "the states of callbacks that have some are always restored",
    "save_only_model": "checkpoints are for resuming; trainer.save_model() saves the weights alone",
    "skip_memory_metrics": "memory/peak is logged",
    "torch_compile": NOT_COMPILED,
    "torch_compile_backend": NOT_COMPILED,
    "torch_compile_mode": NOT_COMPILED,
    "torch_empty_cache_steps": "lower max_tokens_per_microbatch, or set logits_chunk",
    "train_sampling_strategy": "the order of the data is drawn from seed",
}
"""The arguments that would do nothing although they promise other results, speed or memory, and what to do instead."""

OPTIMIZERS = {
    "schedule_free": "its weights are averages that a trainer would have to put in their place around every sampling",
    "galore": "it replaces layers' hooks by modules that are named to it, and keeps no state of single weights",
    "apollo": "it replaces layers' hooks by modules that are named to it, and keeps no state of single weights",
    "lomo": "it steps weights within the backward pass, so that gradients can be neither clipped nor summed",
    "adalomo": "it steps weights within the backward pass, so that gradients can be neither clipped nor summed",
}
"""What the names of optimizers begin with that cannot be used, and why."""

COUNTS = {
    "num_total_batches": "total_episodes, or max_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "local_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "local_mini_batch_size": "num_mini_batches",
    "mini_batch_size": "num_mini_batches",
}
"""The counts that the trainer fills in, and what to set in their place."""


def check_training_arguments(args: TrainingArguments) -> None:
    """Check that no argument is set that would do nothing.

    Raises:
        ValueError: one is. The message says what to do instead.
    """
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in REFUSED and value not in (field.default, None, []):
            raise ValueError(f"{field.name}: would do nothing here; leave it out: {REFUSED[field.name]}")
        if field.name in COUNTS and value is not None:
            raise ValueError(f"{field.name}: the trainer fills it in; set {COUNTS[field.name]} instead")
    name = str(getattr(args.optim, "value", args.optim))
    for kind, why in OPTIMIZERS.items():
        if name.startswith(kind):
            raise ValueError(f"optim: {name} cannot be used here, because {why}; use adamw_torch")
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        raise ValueError("lr_scheduler_type: reduce_lr_on_plateau steps by a metric; use one that steps by updates")
    if args.metric_for_best_model in ("loss", "eval_loss"):
        raise ValueError("metric_for_best_model: evaluations have no loss; name a metric of theirs, such as 'score'")
    if args.logging_strategy == "epoch":
        raise ValueError("logging_strategy: expected 'steps' (counted in updates) or 'no', got 'epoch'")
    check_liger(args)


def deciding_names(kind: Any) -> list[str]:
    """Return the names of the options of a class of arguments that a resumed run may not change."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    fields = [field.name for field in dataclasses.fields(kind)]
    return [name for name in fields if name in DECIDING or not (name in inherited or name in kind.may_change)]


def deciding_options(args: Any) -> dict[str, Any]:
    """Return the options of ``args`` that decide a run's weights, by name, as JSON values.

    These are :data:`DECIDING`, the number of completions in an update, and all own options of ``args`` that are not
    among its ``may_change``. The number of updates is one of them where the learning rate depends on it.
    """
    options = json.loads(json.dumps({name: getattr(args, name) for name in deciding_names(type(args))}, default=str))
    if isinstance(args.learning_rate, DefaultRate):
        options["learning_rate"] = None  # a policy's kind decides its rate
    if str(options["lr_scheduler_type"]) in ("constant", "constant_with_warmup"):
        del options["num_total_batches"]
    return options


def is_longer(was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a run whose learning rate depends on the number of updates has more of them than before."""
    return now.get("num_total_batches", 0) > was.get("num_total_batches", float("inf"))


def check_options(folder: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a resumed run has the deciding options of its checkpoint ``folder``. It may be longer.

    Only names that both have are compared, because another version may have other options.

    Raises:
        CheckpointError: an option differs. The message names all that do.
    """
    changed = [name for name in now if name in was and was[name] != now[name]]
    if changed and not (changed == ["num_total_batches"] and is_longer(was, now)):
        differences = ", ".join(f"{name} was {was[name]!r} and is {now[name]!r}" for name in changed)
        raise CheckpointError(
            f"{folder}: was made with other options ({differences}); resume with the same ones, or begin another run "
            "from its weights in another output_dir"
        )
