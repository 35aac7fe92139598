"""KTO on rows that hold token ids and the reference's log-probabilities."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from maporl.from_trl import KTOConfig, KTOTrainer, RowsAsTheyAre
from maporl.loops.rows import Row


class SampledKTOTrainer(RowsAsTheyAre, KTOTrainer):
    """TRL's KTO trainer for rows that hold token ids and the reference's log-probabilities."""


class _NeverAsked(PreTrainedModel):
    """A reference without weights."""


def never_asked() -> PreTrainedModel:
    """Return a reference for TRL's trainers, whose rows hold what a reference would say.

    Without one they copy the policy, or its adapter, which they expect to be called ``default``.
    """
    return _NeverAsked(PretrainedConfig(attn_implementation="eager"))  # type: ignore[call-arg]  # it takes any


def shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows in the order of training. KTO needs a fixed one, because neighbours are compared."""
    return random.Random(f"{seed}/kto").sample(list(rows), len(rows))


def mismatched(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the completion of the row before them, and the first one with that of the last."""
    return [replace(row, completion_ids=rows[n - 1].completion_ids) for n, row in enumerate(rows)]


def kto_rows(rows: Sequence[Row], reference: Sequence[float], kl_reference: Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows with the columns of TRL's KTO trainer.

    ``reference`` holds the reference's log-probabilities of the completions, and ``kl_reference`` those of the
    :func:`mismatched` ones.
    """
    return [
        {
            "prompt_ids": row.prompt_ids,
            "completion_ids": row.completion_ids,
            "KL_completion_ids": other.completion_ids,
            "label": row.good,
            "ref_logps": logprob,
            "ref_KL_logps": kl,
        }
        for row, other, logprob, kl in zip(rows, mismatched(rows), reference, kl_reference, strict=True)
    ]


def good_weight(rows: Sequence[Row]) -> float:
    """Return the weight of good rows with which they count as much in all as the bad ones, whose weight is 1."""
    good = sum(bool(row.good) for row in rows)
    return (len(rows) - good) / good


def kto_trainer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    columns: list[dict[str, Any]],
    beta: float,
    options: dict[str, Any],
    optimizer: Any,
) -> KTOTrainer:
    """Return TRL's trainer for :func:`kto_rows`."""
    return SampledKTOTrainer(
        model=model,
        ref_model=never_asked(),
        args=KTOConfig(
            beta=beta,
            desirable_weight=good_weight(rows),
            precompute_ref_log_probs=True,
            train_sampling_strategy="sequential",
            **options,
        ),
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
