"""Train a policy on the rows of a loop, by TRL's SFT or DPO trainer, on the token ids as they were sampled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedModel, PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from maporl.config.loops import StageSection
from maporl.config.schema import Config
from maporl.loops.rows import Pair, Row
from maporl.team.agents import Policy
from trl_ext.forward import base_of
from trl_ext.master_weights import MasterAdamW
from trl_ext.maths import token_logprobs


class SampledDPOTrainer(DPOTrainer):
    """TRL's DPO trainer for rows that hold token ids and the reference's log-probabilities.

    TRL's own preparation would encode texts again, and end answers with EOS that were cut off. Its own reference is the
    model as it was first loaded, which is not the policy at the start of a stage.
    """

    def _prepare_dataset(self, dataset: Any, *args: Any, **options: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **options: Any) -> Any:
        return dataset


class _NeverAsked(PreTrainedModel):
    """A reference without weights. The rows hold what a reference would say, but TRL copies the policy without one."""


def train_stage(
    config: Config, stage: StageSection, policy: Policy, rows: Sequence[Row | Pair], scratch: Path, quiet: bool = False
) -> dict[str, float]:
    """Train ``policy`` on ``rows``, in place.

    Args:
        config: the run's configuration, for its device, precision and seed.
        stage: the trainer and its options.
        policy: the policy, with the weights at which the stage starts.
        rows: its rows: pairs for DPO, and others for SFT.
        scratch: a folder that TRL may write into.
        quiet: whether to hide progress.

    Returns:
        The mean loss. For DPO also the mean of the log-probabilities of the chosen and of the rejected completions, before
        and after the stage.
    """
    with policy.active():
        if stage.train == "sft":
            return {"loss": _train_sft(config, stage, policy, rows, scratch, quiet)}
        return _train_dpo(config, stage, policy, [row for row in rows if isinstance(row, Pair)], scratch, quiet)


def sft_rows(rows: Sequence[Row]) -> list[dict[str, list[int]]]:
    """Return the rows with the columns of TRL's SFT trainer. Only the completion bears loss."""
    return [
        {
            "input_ids": [*row.prompt_ids, *row.completion_ids],
            "completion_mask": [0] * len(row.prompt_ids) + [1] * len(row.completion_ids),
        }
        for row in rows
    ]


def dpo_rows(pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]) -> list[dict[str, Any]]:
    """Return the pairs with the columns of TRL's DPO trainer.

    ``chosen`` and ``rejected`` are the reference's log-probabilities of the two completions.
    """
    return [
        {
            "prompt_ids": pair.chosen.prompt_ids,
            "chosen_ids": pair.chosen.completion_ids,
            "rejected_ids": pair.rejected.completion_ids,
            "ref_chosen_logps": one,
            "ref_rejected_logps": other,
        }
        for pair, one, other in zip(pairs, chosen, rejected, strict=True)
    ]


@torch.no_grad()
def completion_logprobs(policy: Policy, rows: Sequence[Row]) -> list[float]:
    """Return the log-probability of each row's completion after its prompt, in nats, summed over its tokens.

    The rows are computed one at a time, so none is padded.
    """
    found = []
    with policy.active():
        training, device = policy.model.training, base_of(policy.model).device
        policy.model.eval()
        for row in rows:
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]], device=device)
            start = len(row.prompt_ids)
            logits = policy.model(input_ids=ids).logits[:, start - 1 : -1].float()
            found.append(float(token_logprobs(logits, ids[:, start:]).sum()))
        policy.model.train(training)
    return found


def _options(config: Config, stage: StageSection, scratch: Path, quiet: bool) -> dict[str, Any]:
    return {
        "output_dir": str(scratch),
        "num_train_epochs": stage.epochs,
        "learning_rate": stage.learning_rate,
        "per_device_train_batch_size": stage.batch_size,
        "max_length": None,
        "bf16": config.training.bf16,
        "gradient_checkpointing": config.training.gradient_checkpointing,
        "use_cpu": config.training.use_cpu,
        "seed": config.seed,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": config.training.report_to,
        "disable_tqdm": quiet,
    }


def _optimizer(policy: Policy, stage: StageSection) -> torch.optim.Optimizer:
    learning = [p for p in policy.model.parameters() if p.requires_grad]
    return MasterAdamW(learning, lr=stage.learning_rate)


def _train_sft(
    config: Config, stage: StageSection, policy: Policy, rows: Sequence[Row | Pair], scratch: Path, quiet: bool
) -> float:
    trainer = SFTTrainer(
        model=policy.model,
        args=SFTConfig(completion_only_loss=True, **_options(config, stage, scratch, quiet)),
        train_dataset=Dataset.from_list(sft_rows([row for row in rows if isinstance(row, Row)])),
        processing_class=policy.tokenizer,
        optimizers=(_optimizer(policy, stage), None),
    )
    return _run(trainer, quiet)


def _train_dpo(
    config: Config, stage: StageSection, policy: Policy, pairs: list[Pair], scratch: Path, quiet: bool
) -> dict[str, float]:
    sides = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    before = [completion_logprobs(policy, side) for side in sides]
    reference = [[0.0] * len(pairs)] * 2 if stage.reference == "none" else before
    trainer = SampledDPOTrainer(
        model=policy.model,
        ref_model=_NeverAsked(PretrainedConfig(attn_implementation="eager")),  # type: ignore[call-arg]  # it takes any
        args=DPOConfig(
            beta=0.1 if stage.beta is None else stage.beta,
            precompute_ref_log_probs=True,
            **_options(config, stage, scratch, quiet),
        ),
        train_dataset=Dataset.from_list(dpo_rows(pairs, *reference)),
        processing_class=policy.tokenizer,
        optimizers=(_optimizer(policy, stage), None),
    )
    loss = _run(trainer, quiet)
    after = [completion_logprobs(policy, side) for side in sides]
    names = ("chosen_before", "rejected_before", "chosen_after", "rejected_after")
    means = {name: sum(own) / len(own) for name, own in zip(names, [*before, *after], strict=True)}
    return {"loss": loss, **means}


def _run(trainer: Any, quiet: bool) -> float:
    if quiet:
        trainer.remove_callback(PrinterCallback)
    return float(trainer.train().training_loss)
