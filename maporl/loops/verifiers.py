"""Train a verifier of whole dialogues on comparisons, by TRL's reward trainer."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset

from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.from_trl import RewardConfig, RewardTrainer
from maporl.loops.rows import Comparison
from maporl.loops.section import RewardStage
from maporl.loops.stages import optimizer_of, run_quietly, trainer_options
from maporl.tasks.base import Task
from maporl.verifier.encoding import chat_of, encode
from maporl.verifier.model import Verifier
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import first_verifier

FOLDER = "others/verifier"
"""Where a stage's folder keeps the verifier, as checkpoints do."""


def verifier_of(section: VerifierSection, weights: Path | None) -> Verifier:
    """Return the verifier that ``section`` describes, or the trained one in a stage's folder."""
    if weights is not None and (weights / FOLDER).is_dir():
        section = replace(section, model=str(weights / FOLDER), tiny=None)
    return first_verifier(section)


def train_verifier(
    config: Config,
    stage: RewardStage,
    verifier: Verifier,
    rows: Sequence[Comparison],
    task: Task,
    scratch: Path,
    quiet: bool = False,
) -> dict[str, float]:
    """Train ``verifier`` in place by ``-log sigmoid(s+ - s-)``, where s is its output at the end of a chat.

    Args:
        config: the run's configuration, for its device, precision and seed.
        stage: the options.
        verifier: the verifier.
        rows: the comparisons.
        task: says how a question is put.
        scratch: a folder that TRL may write into.
        quiet: whether to hide progress.

    Returns:
        The mean loss, the mean gap, and the share of the comparisons that it decides rightly after the stage.

    Raises:
        TooLong: a dialogue has more tokens than the verifier reads.
    """
    pairs = [
        [
            encode(verifier.tokenizer, chat_of(task.question(row.example), text), verifier.longest)
            for text in (row.chosen, row.rejected)
        ]
        for row in rows
    ]
    model, tokenizer = verifier.model.requires_grad_(True), copy.deepcopy(verifier.tokenizer)
    padding = model.config.pad_token_id
    options = trainer_options(config, stage, None, scratch, quiet)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(pad_token=_padding(tokenizer, pairs), **options),
        train_dataset=Dataset.from_list([{"chosen_ids": one, "rejected_ids": other} for one, other in pairs]),
        processing_class=tokenizer,
        optimizers=(optimizer_of(config, model, options["learning_rate"]), None),
    )
    loss = run_quietly(trainer, quiet)
    model.config.pad_token_id = padding
    model.requires_grad_(False).eval()
    scores = verifier.score_ids([ids for pair in pairs for ids in pair])
    right = [one > other for one, other in zip(scores[::2], scores[1::2], strict=True)]
    return {
        "rows": len(rows),
        "loss": loss,
        "mean_gap": sum(row.gap for row in rows) / len(rows),
        "pair_accuracy": sum(right) / len(rows),
    }


def _padding(tokenizer: object, pairs: Sequence[Sequence[list[int]]]) -> str:
    """Return a token at which no chat ends, because a chat's end is its last token before the padding."""
    ends = {ids[-1] for pair in pairs for ids in pair}
    free = (token for token, number in tokenizer.get_vocab().items() if number not in ends)  # type: ignore[attr-defined]
    padding = next(free, None)
    if padding is None:
        raise ConfigError(
            "reward.verifier: chats end with every token of its vocabulary, so nothing is left to pad them with"
        )
    return padding
