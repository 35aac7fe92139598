"""Training a verifier on labelled answers: ``maporl verifier train``.

The model is a causal trunk with one output. A LoRA on the trunk learns by binary cross-entropy, at every token of the
answer or at the last one. The saved model is merged, so that ``from_pretrained`` loads the folder, and it is measured
by the code that will serve it.
"""

import json
import logging
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.storage.run_folder import must_be_empty
from maporl.team.loading import read_chat_template
from maporl.tiny import build_tiny_classifier, build_tiny_tokenizer
from maporl.verifier.card import write_card
from maporl.verifier.data import DataError, Sample, read_samples, sha256
from maporl.verifier.encoding import answer_start, encode
from maporl.verifier.measures import (
    by_length,
    by_question,
    fit_temperature,
    reached_by_chance,
    summary,
)
from maporl.verifier.model import RECORD, VerifierError, chance_of, last_outputs, token_outputs
from maporl.verifier.options import TrainOptions
from trl_ext.chat.encoding import ChatError, Tokenizer, check_tokenizer, context_of
from trl_ext.files.atomic import new_folder
from trl_ext.files.lock import RunLock
from trl_ext.models.adapters import fitted
from trl_ext.models.forward import base_of
from trl_ext.models.weights import WeightsError, read_model, read_pretrained
from trl_ext.process import distributed

logger = logging.getLogger(__name__)
_DTYPES = {False: torch.float32, True: torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One encoded chat. The answer is ``ids[start:]``, and includes what the template writes after it."""

    question: str
    ids: list[int]
    start: int
    label: float


# -- data ---------------------------------------------------------------------------------------------------------


def encode_rows(samples: Sequence[Sample], tokenizer: Tokenizer, longest: int) -> tuple[list[Row], int]:
    """(rows, number left out): the samples of at most ``longest`` tokens, encoded, and how many are longer."""
    rows = []
    for sample in samples:
        ids = encode(tokenizer, sample.chat())
        if len(ids) <= longest:
            rows.append(Row(sample.id, ids, answer_start(tokenizer, sample.chat()), float(sample.correct)))
    return rows, len(samples) - len(rows)


def split_by_question(rows: Sequence[Row], held_out: float, seed: int, where: str) -> tuple[list[Row], list[Row]]:
    """(trained on, held out): all answers of a question are on one side, and each side has at least one question.

    ``where`` names the file in errors.

    Raises:
        DataError: there is only one question, or all answers to train on have the same label.
    """
    names = sorted({row.question for row in rows})
    if len(names) < 2:
        raise DataError(
            f"{where}: {len(names)} questions are left, but at least 2 are needed, because whole questions are held "
            "out; give more data, or allow longer rows (--longest)"
        )
    random.Random(seed).shuffle(names)
    held_names = set(names[: min(max(1, round(len(names) * held_out)), len(names) - 1)])
    train = [row for row in rows if row.question not in held_names]
    if len({row.label for row in train}) < 2:
        raise DataError(
            f"{where}: all {len(train)} rows to train on have the label {bool(train[0].label)}, so that nothing can be "
            "learned; balance the data (maporl verifier balance)"
        )
    return train, [row for row in rows if row.question in held_names]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Right-padded ``input_ids`` [N, T], the answers' ``starts`` and ``ends`` [N] and ``labels`` [N]."""
    width = max(len(row.ids) for row in rows)
    return {
        "input_ids": torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows]),
        "starts": torch.tensor([row.start for row in rows]),
        "ends": torch.tensor([len(row.ids) for row in rows]),
        "labels": torch.tensor([row.label for row in rows]),
    }


# -- learning -----------------------------------------------------------------------------------------------------


def answer_loss(outputs: Tensor, starts: Tensor, ends: Tensor, labels: Tensor, loss: str) -> Tensor:
    """Binary cross-entropy of ``outputs`` [N, T] against each row's label, nats.

    ``every``: the mean over the answer tokens of all rows. ``last``: the mean over rows, at the token where the score
    is read.
    """
    if loss == "last":
        rows = torch.arange(len(ends), device=outputs.device)
        return binary_cross_entropy_with_logits(outputs[rows, ends - 1], labels)
    columns = torch.arange(outputs.shape[1], device=outputs.device)
    in_answer = (columns >= starts[:, None]) & (columns < ends[:, None])
    return binary_cross_entropy_with_logits(outputs[in_answer], labels[:, None].expand_as(outputs)[in_answer])


class TokenScores(nn.Module):
    """A module whose forward gives the model's output at every token. Wrappers for several processes need a forward."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """[N, T] ids -> [N, T] outputs, float32."""
        return token_outputs(base_of(self.model), input_ids)


class VerifierTrainer(Trainer):
    """``transformers.Trainer`` with :func:`answer_loss`; ``token_loss`` says at which tokens."""

    token_loss = "every"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return :func:`answer_loss` of a batch, and the model's outputs if ``return_outputs`` asks for them."""
        outputs = model(inputs.pop("input_ids"))
        loss = answer_loss(outputs, loss=self.token_loss, **inputs)
        return (loss, outputs) if return_outputs else loss


def load_base(options: TrainOptions) -> tuple[PreTrainedModel, Tokenizer]:
    """(model, tokenizer): the base model with a new output layer, and a tokenizer that is ready to be saved and served.

    Raises:
        VerifierError: the model cannot be loaded, or its tokenizer lacks what is needed.
        ConfigError: no model is named, or the chat template cannot be read.
    """
    base = options.tiny or options.model
    if base is None:
        raise ConfigError("--model, --tiny, CONFIG: expected one of them, which says what the verifier begins with")
    expected = "expected a folder saved by save_pretrained, or the hub name of a causal language model"
    try:
        if isinstance(base, TinySection):
            tokenizer = build_tiny_tokenizer(base)
        else:
            tokenizer = read_pretrained(AutoTokenizer, options.tokenizer or base)
    except WeightsError as error:
        raise VerifierError(f"--{'tokenizer' if options.tokenizer else 'model'} {error}; {expected}") from error
    if options.chat_template is not None:
        tokenizer.chat_template = read_chat_template(options.chat_template, "--chat-template")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # rows know their lengths, so that no id need mean padding
    try:
        check_tokenizer(tokenizer, f"--model {base!r}" if isinstance(base, str) else "--tiny")
    except ChatError as error:
        raise VerifierError(f"{error}; --chat-template sets one here") from error
    if isinstance(base, TinySection):
        return build_tiny_classifier(base, tokenizer), tokenizer
    try:
        kind, dtype = AutoModelForSequenceClassification, _DTYPES[options.bf16]
        model = read_model(kind, base, new="score", num_labels=1, dtype=dtype)
    except WeightsError as error:
        raise VerifierError(f"--model {error}; {expected}") from error
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def fit(model: PreTrainedModel, rows: list[Row], options: TrainOptions, folder: Path, quiet: bool) -> PreTrainedModel:
    """Train a LoRA and the output layer on ``rows``, and return the model with the LoRA merged.

    A tiny random model has nothing to keep, and all its weights learn.
    """
    lora = LoraConfig(
        r=options.lora_r, lora_alpha=options.lora_alpha, target_modules="all-linear", modules_to_save=["score"],
        task_type="SEQ_CLS",
    )  # fmt: skip
    learning: Any = model if options.tiny is not None else get_peft_model(model, fitted(lora, model))
    for parameter in learning.parameters():
        if parameter.requires_grad:  # bfloat16 would round steps of 1e-4 away
            parameter.data = parameter.data.float()
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=options.batch_size,
        bf16=options.bf16,
        use_cpu=options.use_cpu or not torch.accelerator.is_available(),  # transformers refuses bf16 without either
        seed=options.seed,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=quiet,
    )
    trainer = VerifierTrainer(TokenScores(learning), args, collate, rows)  # type: ignore[arg-type]  # any sequence serves
    trainer.token_loss = options.loss
    if quiet:
        trainer.remove_callback(PrinterCallback)
    trainer.train()
    merged = learning if options.tiny is not None else learning.merge_and_unload()
    return merged.to(_DTYPES[options.bf16]).eval()


@torch.no_grad()
def outputs_of(model: PreTrainedModel, rows: Sequence[Row], batch_size: int) -> np.ndarray:
    """The output [N] of each row as a server reads it, before temperature and sigmoid.

    Raises:
        VerifierError: an output is not finite.
    """
    outputs = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        outputs[chunk] = last_outputs(model, [rows[i].ids for i in chunk]).cpu().numpy()
    if not np.isfinite(outputs).all():
        raise VerifierError("training diverged: outputs are not finite and nothing was saved; lower --learning-rate")
    return outputs


# -- measuring ----------------------------------------------------------------------------------------------------


def evaluate(outputs: np.ndarray, rows: Sequence[Row], seed: int) -> tuple[float, dict[str, Any]]:
    """Return the temperature and the measures of held-out rows.

    The temperature is fitted on one half of the questions and measured on the other half. With fewer than 2 questions
    it stays 1.
    """
    labels = np.array([row.label for row in rows])
    names = sorted({row.question for row in rows})
    random.Random(seed).shuffle(names)
    fitted_on = set(names[: len(names) // 2])
    fitting = np.array([row.question in fitted_on for row in rows])
    temperature = fit_temperature(outputs[fitting], labels[fitting]) if fitting.any() else 1.0
    metrics: dict[str, Any] = {
        "held_out": summary(outputs, labels),
        "by_question": by_question(outputs, labels, [row.question for row in rows]),
        "by_answer_tokens": by_length(outputs, labels, np.array([len(row.ids) - row.start for row in rows])),
        "auc_reached_by_chance": reached_by_chance(labels),
    }
    if fitting.any():
        rest = ~fitting
        metrics["other_half_before_temperature"] = summary(outputs[rest], labels[rest])
        metrics["other_half_after_temperature"] = summary(outputs[rest], labels[rest], temperature)
    return temperature, metrics


def train_verifier(file: Path, folder: Path, options: TrainOptions, quiet: bool = False) -> dict[str, Any]:
    """Train on the samples in ``file``, save into ``folder``, and return the record that is saved there.

    Raises:
        RunExists: ``folder`` exists and is not empty.
        FolderInUse: another process trains a verifier into ``folder``.
        DataError: no verifier can be trained on the samples, or too few are held out to measure it.
        VerifierError: the base model cannot be loaded, training diverged, or the verifier is not better than chance.
            Then nothing is saved, unless ``options.save_anyway``.
    """
    must_be_empty(folder)
    work = folder.with_name(f".partial-training-{folder.name}")
    if not distributed.is_main():
        return _train(file, folder, options, quiet, work)
    with RunLock(work):  # beside the folder, which appears when it is complete
        must_be_empty(folder)  # another process may have written it since
        try:
            return _train(file, folder, options, quiet, work)
        finally:
            shutil.rmtree(work)


def _train(file: Path, folder: Path, options: TrainOptions, quiet: bool, work: Path) -> dict[str, Any]:
    samples = read_samples([file])
    set_seed(options.seed)
    model, tokenizer = load_base(options)
    context = context_of(model.config) or options.longest
    rows, too_long = encode_rows(samples, tokenizer, min(options.longest, context))
    train, held_out = split_by_question(rows, options.held_out, options.seed, str(file))
    if not options.save_anyway:
        _must_show_something(held_out, file)
    merged = fit(model, train, options, work, quiet)
    outputs = outputs_of(merged, held_out, options.batch_size)
    temperature, metrics = evaluate(outputs, held_out, options.seed)
    record = {
        "temperature": temperature,
        "loss": options.loss,
        "base_model": options.model or "a tiny random model",
        "data_sha256": sha256(file),
        "rows": {"trained_on": len(train), "held_out": len(held_out), "dropped_too_long": too_long},
        "labels": {str(bool(k)).lower(): n for k, n in sorted(Counter(row.label for row in rows).items())},
        "options": asdict(options),
        "metrics": metrics,
    }
    if (doubt := chance_of(record)) is not None:
        remedy = (
            "train it on more answers, longer or otherwise (--epochs, --learning-rate, maporl verifier generate), or "
            "hold out more questions (--held-out)"
        )
        if not options.save_anyway:
            raise VerifierError(f"{folder}: not saved, because {doubt}; {remedy}. --save-anyway saves it")
        if distributed.is_main():
            logger.warning("%s: %s. It is saved, and its verifier.json says so; %s", folder, doubt, remedy)
    if distributed.is_main():
        _save(merged, tokenizer, record, folder)
    return record


def _must_show_something(held_out: Sequence[Row], file: Path) -> None:
    """Check, before training, that the held-out answers can show what a verifier is worth.

    Raises:
        DataError: they are all right or all wrong, or so few that scores without any meaning may rank them rightly.
    """
    reached = reached_by_chance(np.array([row.label for row in held_out]))
    if reached is not None and reached < 1:
        return
    what = "all right or all wrong" if reached is None else "too few"
    raise DataError(
        f"{file}: the {len(held_out)} held-out answers are {what}, so that nothing would show what the verifier's "
        "scores are worth; hold out more questions (--held-out), or sample and balance more (maporl verifier generate, "
        "balance). --save-anyway trains it without"
    )


def _save(model: PreTrainedModel, tokenizer: Tokenizer, record: dict, folder: Path) -> None:
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=1))
        write_card(partial, folder.name, record)
