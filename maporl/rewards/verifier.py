"""A learned verifier in this process: a sequence classifier that scores question and answer between 0 and 1."""

from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from maporl.config import ConfigError, VerifierSection
from maporl.rewards.sources import RewardFailure, RewardSource, where
from maporl.tasks.base import Task
from maporl.types import Dialogue, Message
from trl_ext.chat import check_tokenizer, render
from trl_ext.scoring import ModelReward


def load_verifier(section: VerifierSection) -> RewardSource:
    """The source that ``reward.verifier`` describes; its model is loaded once per process."""
    reward = _load(section.model, section.batch_size)

    def score(dialogues: list[Dialogue], task: Task) -> list[list[float | None]]:
        asked = [(d, u) for d in dialogues for u in d.utterances]
        chats = [
            [{"role": "user", "content": task.question(d.example)}, {"role": "assistant", "content": u.words()}]
            for d, u in asked
        ]
        scores = iter(checked(probabilities(reward, chats), asked, section.model))
        return [[next(scores) for _ in d.utterances] for d in dialogues]

    return score


def probabilities(reward: ModelReward, chats: list[list[Message]]) -> list[float]:
    """The verifier's probability that each chat's last message is right: the sigmoid of its score."""
    texts = [render(reward.tokenizer, chat, generate=False) for chat in chats]
    return torch.tensor(reward.score_texts(texts)).sigmoid().tolist()


def checked(scores: list[float], asked: list, source: str) -> list[float]:
    """``scores`` if there is one for each answer and each is in [0, 1]; else an error that names ``source``."""
    if len(scores) != len(asked):
        raise RewardFailure(f"verifier {source}: expected {len(asked)} scores, got {len(scores)}")
    for score, (dialogue, utterance) in zip(scores, asked, strict=True):
        if not 0.0 <= score <= 1.0:  # also where it is NaN
            raise RewardFailure(
                f"verifier {source}: expected scores in [0, 1], got {score} for {where(dialogue, utterance)}"
            )
    return scores


@cache
def _load(source: str, batch_size: int) -> ModelReward:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForSequenceClassification.from_pretrained(source)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"reward.verifier.model: {source!r} could not be loaded ({first_line}); give the folder or hub name of a "
            "sequence-classification model with one output"
        ) from error
    if model.config.num_labels != 1:
        raise ConfigError(
            f"reward.verifier.model: {source!r} has {model.config.num_labels} outputs; expected a model with one"
        )
    check_tokenizer(tokenizer, f"reward.verifier.model {source!r}")
    if torch.cuda.is_available():
        model = model.cuda()
    return ModelReward(model.eval(), tokenizer, batch_size)
