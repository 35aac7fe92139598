"""Train a policy on the rows of a loop, by TRL's SFT, DPO or KTO trainer, on the token ids as they were sampled."""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from maporl.config.algorithm import OF_TEAM, Algorithm
from maporl.config.schema import Config
from maporl.from_trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RowsAsTheyAre, SFTConfig, SFTTrainer
from maporl.loops.rows import Pair, Row
from maporl.loops.section import DPOStage, KTOStage, PolicyStage, RowsStage, SFTStage, StageSection
from maporl.team.agents import Policy
from maporl.training.args import name_of_run
from trl_ext.files.paths import below
from trl_ext.models import forward
from trl_ext.sharding.choice import decayed
from trl_ext.sharding.master_weights import MasterAdamW


class SampledDPOTrainer(RowsAsTheyAre, DPOTrainer):
    """TRL's DPO trainer for rows that hold token ids and the reference's log-probabilities.

    Its own reference is the model as it was first loaded, which is not the policy at the start of a stage.
    """


def train_stage(
    config: Config,
    stage: PolicyStage,
    policy: Policy,
    rows: Sequence[Row | Pair],
    scratch: Path,
    quiet: bool = False,
    reference: Policy | None = None,
) -> dict[str, float]:
    """Train ``policy`` on ``rows``, in place.

    Args:
        config: the run's configuration, for its device, precision and seed.
        stage: the trainer and its options.
        policy: the policy, with the weights at which the stage starts.
        rows: its rows: pairs for DPO, rows with signs for KTO, and others for SFT.
        scratch: a folder that TRL may write into.
        quiet: whether to hide progress.
        reference: the policy with the weights of the reference, if these are not those at which the stage starts.

    Returns:
        The mean loss. For DPO also the mean of the log-probabilities of the chosen and of the rejected completions,
        before and after the stage.
    """
    if isinstance(stage, SFTStage):
        with policy.active():
            return {"loss": _train_sft(config, stage, policy, rows, scratch, quiet)}
    if isinstance(stage, KTOStage):
        with policy.active():
            singles = [row for row in rows if isinstance(row, Row)]
            return {"loss": _train_kto(config, stage, policy, singles, scratch, quiet, reference)}
    assert isinstance(stage, DPOStage)
    learner = DPOLearner(config, stage, policy, [row for row in rows if isinstance(row, Pair)], reference)
    learner.train(stage.epochs, scratch, quiet)
    return learner.figures()


def train_jointly(
    config: Config,
    stage: DPOStage,
    policies: Mapping[str, Policy],
    pairs: Mapping[str, Sequence[Pair]],
    scratch: Path,
    quiet: bool = False,
    references: Mapping[str, Policy] = MappingProxyType({}),
) -> dict[str, dict[str, float]]:
    """Train all ``policies`` by DPO on pairs of joint answers, in place, and return what :func:`train_stage` returns of
    each.

    With ``delta`` as the log-ratio of an agent's chosen answer to its rejected one, less that of its reference, the
    loss of an agent is ``-log sigmoid(beta (its delta + the sum of the others' deltas))``. A pass first computes the
    deltas of all agents, and then trains one policy after another, so the others' deltas are those at the start of the
    pass.

    Args:
        config: the run's configuration.
        stage: the options.
        policies: the policies that are trained, by name.
        pairs: the pairs of each policy.
        scratch: a folder that TRL may write into.
        quiet: whether to hide progress.
        references: the policies with the weights of the reference, if these are not those at which the stage starts.
    """
    learners = {
        name: DPOLearner(config, stage, policies[name], rows, references.get(name), whole=True)
        for name, rows in pairs.items()
    }
    for number in range(int(stage.epochs)):
        totals: dict[tuple, float] = defaultdict(float)
        deltas = {name: learner.deltas() for name, learner in learners.items()}
        for name, rows in pairs.items():
            once = {
                (pair.together, pair.chosen.place): delta for pair, delta in zip(rows, deltas[name], strict=True)
            }  # replay may draw a pair twice
            for (together, _), delta in once.items():
                totals[together] += delta
        for name, learner in learners.items():
            others = [totals[pair.together] - delta for pair, delta in zip(pairs[name], deltas[name], strict=True)]
            learner.train(1, below(scratch, f"{name}-{number}"), quiet, others, config.seed + number)
    return {name: learner.figures() for name, learner in learners.items()}


def sft_rows(rows: Sequence[Row]) -> list[dict[str, list[int]]]:
    """Return the rows with the columns of TRL's SFT trainer.

    Only the completion bears loss, or its part in ``bears_loss``.
    """
    return [
        {
            "input_ids": [*row.prompt_ids, *row.completion_ids],
            "completion_mask": [0] * len(row.prompt_ids)
            + ([1] * len(row.completion_ids) if row.bears_loss is None else [int(bears) for bears in row.bears_loss]),
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


def completion_logprobs(policy: Policy, rows: Sequence[Row]) -> list[float]:
    """Return the log-probability of each row's completion after its prompt, in nats, summed over its tokens."""
    with policy.active():
        return forward.completion_logprobs(policy.model, [(row.prompt_ids, row.completion_ids) for row in rows])


def trainer_options(
    config: Config, stage: RowsStage, adapter: str | None, scratch: Path, quiet: bool
) -> dict[str, Any]:
    """Return the options that all trainers of TRL share. ``adapter`` is trained, or whole weights if it is None."""
    return {
        "output_dir": str(scratch),
        "num_train_epochs": stage.epochs,
        "learning_rate": stage.rate(adapter),
        "per_device_train_batch_size": stage.batch_size,
        "max_length": None,
        "bf16": config.training.bf16,
        "gradient_checkpointing": config.training.gradient_checkpointing,
        "use_cpu": config.training.use_cpu,
        "seed": config.seed,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": config.training.report_to,
        "run_name": name_of_run(config.output_dir),
        "disable_tqdm": quiet,
    }


def optimizer_of(
    config: Config, model: torch.nn.Module, rate: float, algorithm: Algorithm = OF_TEAM
) -> torch.optim.Optimizer:
    """Return an optimizer of what ``model`` trains, with the weight decay of the run or of its ``algorithm``."""
    decay = config.training.weight_decay if algorithm.weight_decay is None else algorithm.weight_decay
    learning = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    return MasterAdamW(decayed(learning, [model], decay), lr=rate, weight_decay=decay)


def _optimizer(config: Config, policy: Policy, stage: StageSection) -> torch.optim.Optimizer:
    return optimizer_of(config, policy.model, stage.rate(policy.adapter), policy.algorithm)


def _train_sft(
    config: Config, stage: SFTStage, policy: Policy, rows: Sequence[Row | Pair], scratch: Path, quiet: bool
) -> float:
    trainer = SFTTrainer(
        model=policy.model,
        args=SFTConfig(completion_only_loss=True, **trainer_options(config, stage, policy.adapter, scratch, quiet)),
        train_dataset=Dataset.from_list(sft_rows([row for row in rows if isinstance(row, Row)])),
        processing_class=policy.tokenizer,
        optimizers=(_optimizer(config, policy, stage), None),
    )
    return run_quietly(trainer, quiet)


def _train_kto(
    config: Config,
    stage: KTOStage,
    policy: Policy,
    rows: Sequence[Row],
    scratch: Path,
    quiet: bool,
    reference: Policy | None,
) -> float:
    rows = shuffled(rows, config.seed)
    sides, judge = (rows, _mismatched(rows)), reference or policy
    logprobs = [[0.0] * len(rows) if stage.reference == "none" else completion_logprobs(judge, side) for side in sides]
    trainer = _kto_trainer(
        policy.model,
        policy.tokenizer,
        rows,
        kto_rows(rows, *logprobs),
        0.1 if stage.beta is None else stage.beta,
        trainer_options(config, stage, policy.adapter, scratch, quiet),
        _optimizer(config, policy, stage),
    )
    return run_quietly(trainer, quiet)


class DPOLearner:
    """Trains one policy by DPO on pairs, in one run or in several passes that share the optimizer and its schedule.

    Args:
        config: the run's configuration.
        stage: the options of DPO.
        policy: the policy.
        pairs: its pairs.
        reference: the policy with the weights of the reference. None: the policy itself, as it is now.
        whole: whether :meth:`train` is called for one pass at a time.
    """

    def __init__(
        self,
        config: Config,
        stage: DPOStage,
        policy: Policy,
        pairs: Sequence[Pair],
        reference: Policy | None = None,
        whole: bool = False,
    ):
        self.config, self.stage, self.policy, self.pairs = config, stage, policy, pairs
        self.losses: list[float] = []
        self.before = self._sides(policy)
        if stage.reference == "none":
            self.reference = ([0.0] * len(pairs),) * 2
        else:
            self.reference = self.before if reference is None else self._sides(reference)
        self.optimizer, self.schedule = _optimizer(config, policy, stage), None
        if whole:  # the rate falls over all passes, and not within each
            steps = int(stage.epochs) * math.ceil(len(pairs) / stage.batch_size)
            self.schedule = LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / steps))

    def _sides(self, policy: Policy) -> tuple[list[float], list[float]]:
        """Return the log-probabilities of the chosen and of the rejected completions."""
        return (
            completion_logprobs(policy, [pair.chosen for pair in self.pairs]),
            completion_logprobs(policy, [pair.rejected for pair in self.pairs]),
        )

    def deltas(self) -> list[float]:
        """Return the log-ratio of each pair under the present weights, less that of the reference."""
        columns = zip(*self._sides(self.policy), *self.reference, strict=True)
        return [chosen - rejected - (one - other) for chosen, rejected, one, other in columns]

    def train(
        self, epochs: float, scratch: Path, quiet: bool, others: Sequence[float] | None = None, seed: int | None = None
    ) -> None:
        """Train for ``epochs``. ``others`` is added to each pair's own delta, and bears no gradient."""
        config, stage = self.config, self.stage
        chosen, rejected = self.reference
        if others is not None:
            chosen = [logprob - other for logprob, other in zip(chosen, others, strict=True)]
        options = trainer_options(config, stage, self.policy.adapter, scratch, quiet) | {"num_train_epochs": epochs}
        with self.policy.active():
            trainer = SampledDPOTrainer(
                model=self.policy.model,
                ref_model=_never_asked(),
                args=DPOConfig(
                    beta=0.1 if stage.beta is None else stage.beta,
                    loss_type=["sigmoid_norm" if stage.norm else "sigmoid", *(["sft"] if stage.likelihood else [])],
                    loss_weights=[1.0, stage.likelihood] if stage.likelihood else None,
                    precompute_ref_log_probs=True,
                    **options | {"seed": config.seed if seed is None else seed},
                ),
                train_dataset=Dataset.from_list(dpo_rows(self.pairs, chosen, rejected)),
                processing_class=self.policy.tokenizer,
                optimizers=(self.optimizer, self.schedule),
            )
            self.losses.append(run_quietly(trainer, quiet))

    def figures(self) -> dict[str, float]:
        """Return the mean loss, and the mean log-probabilities of both sides before and after training."""
        names = ("chosen_before", "rejected_before", "chosen_after", "rejected_after")
        columns = [*self.before, *self._sides(self.policy)]
        means = {name: sum(column) / len(column) for name, column in zip(names, columns, strict=True)}
        return {"loss": sum(self.losses) / len(self.losses), **means}


def run_quietly(trainer: Any, quiet: bool) -> float:
    """Train with a trainer of TRL, and return the mean loss."""
    if quiet:
        trainer.remove_callback(PrinterCallback)
    return float(trainer.train().training_loss)


class _NeverAsked(PreTrainedModel):
    """A reference without weights."""


def _never_asked() -> PreTrainedModel:
    """Return a reference for TRL's trainers, whose rows hold what a reference would say.

    Without one they copy the policy, or its adapter, which they expect to be called ``default``.
    """
    return _NeverAsked(PretrainedConfig(attn_implementation="eager"))  # type: ignore[call-arg]  # it takes any


# -- KTO, on rows that hold the log-probabilities of the reference -----------------------------------------------------


class SampledKTOTrainer(RowsAsTheyAre, KTOTrainer):
    """TRL's KTO trainer for rows that hold token ids and the reference's log-probabilities."""


def shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows in the order of training. KTO needs a fixed one, because neighbours are compared."""
    return random.Random(f"{seed}/kto").sample(list(rows), len(rows))


def _mismatched(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the completion of the row before them, and the first one with that of the last."""
    return [replace(row, completion_ids=rows[n - 1].completion_ids) for n, row in enumerate(rows)]


def kto_rows(rows: Sequence[Row], reference: Sequence[float], kl_reference: Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows with the columns of TRL's KTO trainer.

    ``reference`` holds the reference's log-probabilities of the completions, and ``kl_reference`` those of the
    :func:`_mismatched` ones.
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
        for row, other, logprob, kl in zip(rows, _mismatched(rows), reference, kl_reference, strict=True)
    ]


def good_weight(rows: Sequence[Row]) -> float:
    """Return the weight of good rows with which they count as much in all as the bad ones, whose weight is 1."""
    good = sum(bool(row.good) for row in rows)
    return (len(rows) - good) / good


def _kto_trainer(
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
        ref_model=_never_asked(),
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
