"""Arguments of :class:`trl_ext.PPOv2Trainer`: TRL 1.12's ``PPOConfig`` on the current ``TrainingArguments``."""

import math
import os
import warnings
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_ext.learning.arguments import check_training_arguments
from trl_ext.learning.trl_scripts import TRLScriptOptions
from trl_ext.ppo.options import WHOLE_RATE, DefaultRate, LearnerOptions, PPOOptions, option


@dataclass
class PPOv2Config(PPOOptions, LearnerOptions, TRLScriptOptions, TrainingArguments):  # type: ignore[misc]  # a rate may be left out
    """The options of PPO (:class:`PPOOptions`), of a learner (:class:`LearnerOptions`) and ``TrainingArguments``.

    One update collects ``per_device_train_batch_size * gradient_accumulation_steps`` completions, ``num_generations``
    of each prompt. It then makes ``num_ppo_epochs * num_mini_batches`` optimizer steps, with
    ``per_device_train_batch_size`` rows in each forward and backward pass. ``max_grad_norm``, ``bf16``,
    ``gradient_checkpointing`` and the learning-rate schedule apply. The schedule, ``save_steps``, ``eval_steps`` and
    ``logging_steps`` count updates.

    Raises:
        ValueError: an option is out of its range or not supported here.
    """

    may_change: ClassVar[frozenset[str]] = frozenset(
        (
            *("total_episodes", "num_sample_generations", "logging_steps", "local_rollout_forward_batch_size"),
            *("max_tokens_per_generate", "keep_states", "keep_states_gib", "max_tokens_per_microbatch", "logits_chunk"),
            *("world_size", "micro_batch_size", "local_batch_size", "local_mini_batch_size", "mini_batch_size"),
            *("async_save", "on_void", *(field.name for field in fields(TRLScriptOptions))),
        )
    )
    """The own options that a resumed run may change, because they do not decide its weights, or because a count does
    that the trainer fills in (``num_total_batches``, ``batch_size``)."""

    logging_steps: float = option(1, "Log every so many updates.")
    model_adapter_name: str | None = option(None, "Adapter to train, where the model carries several.")
    ref_adapter_name: str | None = option(None, "Adapter that serves as reference; default: adapters off.")
    num_generations: int = option(1, "Completions of each prompt in an update. Episodes and batches count completions.")
    critic_warmup: int = option(0, "Number of first updates in which only the critic learns.")
    num_sample_generations: int = option(
        10, "How often in a run greedy completions of the evaluation set go to completions.jsonl; 0: never."
    )
    world_size: int | None = option(None, "Filled in by the trainer: number of processes.")
    num_total_batches: int | None = option(None, "Filled in by the trainer: number of updates.")
    micro_batch_size: int | None = option(None, "Filled in by the trainer: rows per forward over all processes.")
    local_batch_size: int | None = option(None, "Filled in by the trainer: rows per update on this process.")
    batch_size: int | None = option(None, "Filled in by the trainer: rows per update over all processes.")
    local_mini_batch_size: int | None = option(
        None, "Filled in by the trainer: the mean number of rows per optimizer step here, rounded up."
    )
    mini_batch_size: int | None = option(None, "Filled in by the trainer: rows per optimizer step over all processes.")

    def __post_init__(self):
        PPOOptions.__post_init__(self)
        with warnings.catch_warnings():  # gradient_checkpointing is an option of every version of transformers here
            warnings.filterwarnings("ignore", message="`gradient_checkpointing", category=FutureWarning)
            TrainingArguments.__post_init__(self)
        check_training_arguments(self)
        if self.learning_rate is None:
            self.learning_rate = DefaultRate(WHOLE_RATE)
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        unset_hf_deepspeed_config()  # models are loaded whole, and each engine shards its own afterwards
        if self.fp16:
            raise ValueError("fp16: loss scaling is not supported here; use bf16=True, which has float32's range")
        for name, smallest in (("num_generations", 1), ("critic_warmup", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < smallest:
                raise ValueError(f"{name}: expected a whole number of at least {smallest}, got {getattr(self, name)!r}")
        for name in ("save_strategy", "eval_strategy"):
            if getattr(self, name) not in ("no", "steps"):
                raise ValueError(f"{name}: expected 'steps' (updates) or 'no', got {getattr(self, name).value!r}")

    @property
    def place_model_on_device(self) -> bool:
        """Return False: each learner moves its models, whole or a part at a time. ``Trainer`` would move them whole."""
        return False

    def count_batches(self, processes: int, rows: int) -> int:
        """Fill in TRL's batch counts for a data set of ``rows`` rows, and return the number of updates.

        Raises:
            ValueError: ``num_mini_batches`` or ``num_generations`` does not divide the batch.
        """
        self.world_size = processes
        self.local_batch_size = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self.micro_batch_size = self.per_device_train_batch_size * self.world_size
        self.batch_size = self.local_batch_size * self.world_size
        # minibatches are those of all processes, and all completions of an example are sampled in one
        for name, size in (("num_mini_batches", self.batch_size), ("num_generations", self.local_batch_size)):
            if size % getattr(self, name):
                several = f" x {processes} processes" if size > self.local_batch_size else ""
                raise ValueError(
                    f"{name}={getattr(self, name)} does not divide the batch of {size} "
                    f"completions (per_device_train_batch_size {self.per_device_train_batch_size} x "
                    f"gradient_accumulation_steps {self.gradient_accumulation_steps}{several}); change one of them"
                )
        self.mini_batch_size = self.batch_size // self.num_mini_batches
        self.local_mini_batch_size = math.ceil(self.mini_batch_size / self.world_size)
        if self.total_episodes is None:
            self.total_episodes = int(self.num_train_epochs * rows * self.num_generations)
        self.num_total_batches = max(1, math.ceil(self.total_episodes / self.batch_size))
        if self.max_steps > 0:
            self.num_total_batches = min(self.num_total_batches, self.max_steps)
        return self.num_total_batches


def check_args(args: Any, kind: type) -> None:
    """Check that a trainer's ``args`` are of its own ``kind``, because the options of others have other names.

    Raises:
        ValueError: they are another trainer's.
    """
    if not isinstance(args, kind):
        raise ValueError(f"args: expected a {kind.__name__}, got a {type(args).__name__}; see docs/howto/from_grpo.md")
