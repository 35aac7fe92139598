"""The verifier as a reward source. Every score is checked before a policy learns from it."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.rewards.base import FunctionSource, RewardFailure, RewardSource, Values, where
from maporl.rewards.identity import Identity, KnowsVerifier
from maporl.tasks.base import Task
from maporl.tiny import build_tiny_classifier, build_tiny_tokenizer
from maporl.types import Dialogue, Message, Utterance
from maporl.verifier.client import Outcome, VerifierClient, server_urls
from maporl.verifier.cotraining import CoTraining
from maporl.verifier.encoding import chat_of, joint_text
from maporl.verifier.model import Verifier, VerifierError, chance_of
from maporl.verifier.section import VerifierSection

logger = logging.getLogger(__name__)
Scores = Callable[[list[list[Message]]], Sequence[float]]


def build(section: RewardSection, voices: Any) -> RewardSource:
    """Return the score of a trained verifier, here or behind a server (``reward.verifier``).

    Raises:
        ConfigError: the section describes no verifier.
    """
    if section.verifier is None:
        raise ConfigError("reward.verifier: the source 'verifier' needs it; give it a model, or use the source 'label'")
    return load_verifier(section.verifier)


def load_verifier(section: VerifierSection) -> RewardSource:
    """The source that ``reward.verifier`` describes: servers if there are URLs, and else a model in this process.

    Raises:
        ConfigError: the section names neither servers nor a model, or the model cannot be loaded.
    """
    urls = server_urls(section)
    if urls:
        return ServedVerifier(VerifierClient(section, urls), section.on_failure == "label")
    if section.learn_every:
        return LearningVerifier(section)
    if section.model is None:
        raise ConfigError("reward.verifier: expected a model to load here, or urls of servers; got neither")
    verifier = _loaded(section.model, section.batch_size, section.attn_implementation)
    if (doubt := chance_of(verifier.record)) is not None:
        logger.warning("reward.verifier.model %s: %s; as a reward it is noise", section.model, doubt)
    squashed = section.pays == "probability"
    source = dialogue_source if section.reads == "dialogue" else verifier_source
    score = source(verifier.score if squashed else verifier.outputs, section.model, bounded=squashed)
    identity = Identity(section.on_change)
    identity.see(verifier.digest(), section.model, f"reward.verifier.model {section.model}")
    return LocalVerifier(score, identity, section.model)


def dialogue_source(scores_of: Scores, name: str, bounded: bool = True) -> RewardSource:
    """A reward source that gives every answer of a dialogue the score of the whole dialogue.

    ``bounded``: it is in [0, 1].
    """

    def score(dialogues: list[Dialogue], task: Task) -> Values:
        asked = [(d, d.answers()[-1]) for d in dialogues if d.answers()]
        chats = [chat_of(task.question(d.example), joint_text(d.utterances)) for d, _ in asked]
        values = checked(scores_of(chats), asked, name, bounded)
        scores = dict(zip([id(d) for d, _ in asked], values, strict=True))
        return [[scores[id(d)] if u.answers else None for u in d.utterances] for d in dialogues]

    return FunctionSource(score)


def verifier_source(scores_of: Scores, name: str, bounded: bool = True) -> RewardSource:
    """A reward source from a function that scores chats.

    ``name`` names it in errors. ``bounded``: scores are in [0, 1].
    """

    def score(dialogues: list[Dialogue], task: Task) -> Values:
        asked = [(d, u) for d in dialogues for u in d.utterances]
        chats = [chat_of(task.question(d.asked(u)), u.words()) for d, u in asked]
        scores = iter(checked(scores_of(chats), asked, name, bounded))
        return [[next(scores) for _ in d.utterances] for d in dialogues]

    return FunctionSource(score, answers_only=True)


class LocalVerifier(KnowsVerifier, RewardSource):
    """A verifier in this process that does not learn: ``score`` gives its scores, and ``identity`` says which one it
    is."""

    def __init__(self, score: RewardSource, identity: Identity, name: str):
        self.score, self.identity, self.asked = score, identity, f"reward.verifier.model {name}"
        self.answers_only = score.answers_only

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Its scores."""
        return self.score(dialogues, task)


class Asked(Protocol):
    """The scorers of a verifier: servers (:class:`maporl.verifier.client.VerifierClient`), or processes of the
    run."""

    urls: tuple[str, ...]
    identity: Identity

    def scores(self, chats: Sequence[list[Message]], references: Sequence[str | None]) -> list[Outcome]:
        """Return a score in [0, 1] for the last message of each chat, or the failure to score it."""
        ...

    def count(self, name: str, by: int = 1) -> None:
        """Add to a count of the metrics."""
        ...

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        ...


class ServedVerifier(KnowsVerifier, RewardSource):
    """A reward source that asks servers, or processes of the run.

    ``label``: an answer that nobody scored gets the grader's 1 or 0 instead.
    """

    answers_only = True

    def __init__(self, client: Asked, label: bool):
        self.client, self.label = client, label
        self.identity, self.asked = client.identity, f"verifier {' or '.join(client.urls)}"

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """The servers' scores, or the grader's 1 or 0.

        Raises:
            RewardFailure: an answer has neither.
        """
        asked = [(d, u) for d in dialogues for u in d.utterances]
        chats = [chat_of(task.question(d.asked(u)), u.words()) for d, u in asked]
        outcomes = self.client.scores(chats, [d.asked(u).answer for d, u in asked])
        missing = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, RewardFailure)]
        if missing and not self.label:
            dialogue, utterance = asked[missing[0]]
            raise RewardFailure(f"{outcomes[missing[0]]}; no score for {where(dialogue, utterance)}")
        scores = [math.nan if isinstance(outcome, RewardFailure) else outcome for outcome in outcomes]
        grades = task.grade_many(
            [asked[i][0].asked(asked[i][1]) for i in missing], [asked[i][1].words() for i in missing]
        )
        for index, grade in zip(missing, grades, strict=True):
            if grade.correct is None:
                raise RewardFailure(
                    f"{outcomes[index]}; and {where(*asked[index])} has no label either: {grade.reason}"
                )
            scores[index] = float(grade.correct)
        self.client.count("labelled", len(missing))
        remaining = iter(checked(scores, asked, " or ".join(self.client.urls)))
        return [[next(remaining) for _ in d.utterances] for d in dialogues]

    def after_update(self, update: int, dialogues: list[Dialogue], task: Task) -> dict[str, float]:
        """Counts since the last update: requests, retries, waits, servers left out, answers that the grader
        labelled."""
        return {f"verifier/{name}": float(value) for name, value in self.client.take_counts().items()}


class LearningVerifier(RewardSource):
    """A verifier in this process that is trained on the answers it scored:
    :mod:`maporl.verifier.cotraining`."""

    answers_only = True
    learns = True

    def __init__(self, section: VerifierSection):
        verifier = first_verifier(section)
        self.score = verifier_source(verifier.score, verifier.name)
        self.learning = CoTraining(verifier, section)

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """The scores of the verifier as it is now."""
        return self.score(dialogues, task)

    def after_update(self, update: int, dialogues: list[Dialogue], task: Task) -> dict[str, float]:
        """Gather pairs of right and wrong answers, and train on them if it is time to."""
        return self.learning.after_update(update, dialogues, task)

    def save(self, folder: Path) -> None:
        """Write the verifier, and what is needed to go on training it, into ``folder``."""
        self.learning.save(folder)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the folder's weights or optimizer state cannot be read.
        """
        self.learning.load(folder)


def checked(
    scores: Sequence[float], asked: list[tuple[Dialogue, Utterance]], name: str, bounded: bool = True
) -> Sequence[float]:
    """``scores``, after checking that there is one for each answer and that each is in [0, 1], or finite if they are
    not ``bounded``.

    Raises:
        RewardFailure: they are not; names the verifier, and the answer with the wrong score.
    """
    if len(scores) != len(asked):
        raise RewardFailure(f"verifier {name}: expected {len(asked)} scores, got {len(scores)}")
    for score, (dialogue, utterance) in zip(scores, asked, strict=True):
        if not (0.0 <= score <= 1.0 if bounded else math.isfinite(score)):  # NaN is neither
            raise RewardFailure(
                f"verifier {name}: expected {'scores in [0, 1]' if bounded else 'finite scores'}, got {score} for "
                f"{where(dialogue, utterance)}"
            )
    return scores


def first_verifier(section: VerifierSection) -> Verifier:
    """The verifier that ``section`` describes, as it is before it learns.

    Raises:
        ConfigError: its model cannot be loaded.
    """
    if section.tiny is None:
        return _load(str(section.model), section.batch_size, section.attn_implementation, may_begin=True)
    tokenizer = build_tiny_tokenizer(section.tiny)
    with torch.random.fork_rng(devices=[]):  # processes have drawn different numbers so far
        torch.manual_seed(0)
        model = build_tiny_classifier(section.tiny, tokenizer)
    return Verifier.of(model, tokenizer, "reward.verifier.tiny", batch_size=section.batch_size, begins=True)


def _load(source: str, batch_size: int, attention: str | None, may_begin: bool = False) -> Verifier:
    try:
        return Verifier.load(source, batch_size=batch_size, attn_implementation=attention, may_begin=may_begin)
    except VerifierError as error:
        raise ConfigError(f"reward.verifier.model: {error}") from error


def forget_verifiers() -> None:
    """Let go of the verifiers in this process that do not learn, before others take their place."""
    _loaded.cache_clear()


_loaded = cache(_load)
