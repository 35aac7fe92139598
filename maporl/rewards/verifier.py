"""The verifier as a reward source: scores of question and answer, checked before anything is learned from them."""

from collections.abc import Callable
from functools import cache

from maporl.config import ConfigError, VerifierSection
from maporl.rewards.sources import RewardFailure, RewardSource, where
from maporl.tasks.base import Task
from maporl.types import Dialogue, Message, Utterance
from maporl.verifier.encoding import chat_of
from maporl.verifier.model import Verifier, VerifierError

Scores = Callable[[list[list[Message]]], list[float]]


def load_verifier(section: VerifierSection) -> RewardSource:
    """The source that ``reward.verifier`` describes; its model is loaded once per process."""
    return verifier_source(_load(section.model, section.batch_size).score, section.model)


def verifier_source(scores_of: Scores, name: str) -> RewardSource:
    """A reward source of anything that scores chats; ``name`` names it in errors."""

    def score(dialogues: list[Dialogue], task: Task) -> list[list[float | None]]:
        asked = [(d, u) for d in dialogues for u in d.utterances]
        chats = [chat_of(task.question(d.example), u.words()) for d, u in asked]
        scores = iter(checked(scores_of(chats), asked, name))
        return [[next(scores) for _ in d.utterances] for d in dialogues]

    return score


def checked(scores: list[float], asked: list[tuple[Dialogue, Utterance]], name: str) -> list[float]:
    """``scores`` if there is one for each answer and each is in [0, 1]; else an error that names the verifier."""
    if len(scores) != len(asked):
        raise RewardFailure(f"verifier {name}: expected {len(asked)} scores, got {len(scores)}")
    for score, (dialogue, utterance) in zip(scores, asked, strict=True):
        if not 0.0 <= score <= 1.0:  # also where it is NaN
            raise RewardFailure(
                f"verifier {name}: expected scores in [0, 1], got {score} for {where(dialogue, utterance)}"
            )
    return scores


@cache
def _load(source: str, batch_size: int) -> Verifier:
    try:
        return Verifier.load(source, batch_size=batch_size)
    except VerifierError as error:
        raise ConfigError(f"reward.verifier.model: {error}") from error
