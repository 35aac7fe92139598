"""Every reward source by name, and how a configuration builds it. Importing this module imports no torch."""

from collections.abc import Callable, Collection
from inspect import signature
from typing import Any, Protocol

from maporl.config.imports import Parts, kind_of, look_up, must_take
from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.rewards.base import FunctionSource, RewardSource, Scoring
from maporl.rewards.judges import PointwiseJudge
from maporl.rewards.labels import (
    Brevity,
    critical_steps,
    f1,
    is_judgement,
    is_verdict,
    label,
    majority,
    near,
    readable,
    tokens,
    verdict,
)
from maporl.types import Message, Utterance


class Voices(Protocol):
    """The requests that sources may make to a team's models. :class:`maporl.rollout.player.Player` is one."""

    def speak(self, agent: str, conversations: list[list[Message]]) -> list[str]:
        """Return the greedy answer of an agent to each conversation (:data:`maporl.rewards.judges.Speak`)."""

    def nll(self, utterances: list[Utterance]) -> list[float]:
        """Return how unlikely utterances are to the weights before training (:data:`maporl.rewards.build.Nll`)."""


def _function(function: Scoring, answers_only: bool = False, compares: bool = False) -> "Builder":
    """Return the builder of a source that is a function, with the function's docstring."""

    def build(section: RewardSection, voices: Voices | None) -> RewardSource:
        return FunctionSource(function, answers_only, compares)

    build.__doc__ = function.__doc__
    return build


def _brevity(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return how short an answer is, against ``reward.brevity.tokens``."""
    if section.brevity is None:
        raise ConfigError("reward.brevity: the source 'brevity' needs it; for example reward.brevity: {tokens: 512}")
    return Brevity(section.brevity.tokens)


def _judge(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the score that an agent which does not play gives (``reward.judge``)."""
    if section.judge is None or voices is None:
        raise ConfigError("reward.judge: the source 'judge' needs it; give it an agent, or use another source")
    return PointwiseJudge(section.judge, voices.speak)


Builder = Callable[[RewardSection, Voices | None], RewardSource]

SOURCES = Parts(
    {
        "label": _function(label, answers_only=True),
        "format": _function(readable, answers_only=True),
        "near": _function(near, answers_only=True),
        "f1": _function(f1, answers_only=True),
        "faithful": "maporl.methods.prover_verifier:build",
        "majority": _function(majority, answers_only=True, compares=True),
        "peer_majority": "maporl.methods.co_rl:build",
        "verdict": _function(verdict),
        "critical_steps": _function(critical_steps),
        "tokens": _function(tokens),
        "repeats": "maporl.methods.r_zero:build",
        "verifiers": "maporl.integrations.verifiers_rewards:build",
        "brevity": _brevity,
        "verifier": "maporl.verifier.source:build",
        "judge": _judge,
        "arena": "maporl.methods.arenarl:build",
        "nll": "maporl.methods.optima:build",
        "annotator": "maporl.methods.oni:build",
        "judgement": "maporl.methods.reseek:build",
    }
)
"""Builds each source: ``(reward section, voices) -> source``. ``voices`` are what it may ask of the team's models. The
source of one method or library alone has a module of its own, which is imported when the source is built."""

ANSWERS_ONLY = frozenset(
    {"label", "format", "near", "f1", "majority", "peer_majority", "brevity", "verifier", "judge", "arena"}
)
"""The sources of :data:`SOURCES` that score answers only (:attr:`RewardSource.answers_only`). ``maporl check`` must
know it without building them, because some load a model."""

UNIT_SOURCES = frozenset({"label", "format", "near", "f1"})
"""The sources of :data:`SOURCES` that give a right answer in the expected form 1 and no answer less than 0."""


def scores_others(section: RewardSection, utterance: Utterance) -> list[str]:
    """Return the names of the sources of :data:`SOURCES` that score an utterance that does not answer."""
    coaches = section.judge is not None and section.judge.scores == "everything"
    scoring = {"judge": coaches, "verdict": is_verdict(utterance), "nll": section.sources.get("nll", 0.0) != 0}
    scoring["judgement"] = is_judgement(utterance)
    scoring["tokens"] = section.sources.get("tokens", 0.0) != 0 and bool(utterance.response_ids)
    scoring["annotator"] = True  # if anything is observed after it
    return [name for name, scores in scoring.items() if scores and name in section.sources]


def build_sources(
    section: RewardSection, names: Collection[str], voices: Voices | None = None, others: Collection[str] = ()
) -> dict[str, RewardSource]:
    """Build the sources called ``names``. ``others`` are those that the run has already, for errors.

    Raises:
        ConfigError: a name is unknown, or a source lacks the part of ``section`` that describes it.
    """
    return {name: find_source(name, pays=others)(section, voices) for name in names}


def is_completion_reward(part: Any) -> bool:
    """Return whether ``part`` is a function of ``completions``, as TRL's ``GRPOTrainer`` takes them."""
    if isinstance(part, type | RewardSource) or not callable(part):
        return False
    try:
        return "completions" in signature(part).parameters
    except ValueError:  # some functions that are written in C do not say
        return False


def _completion_reward(function: Any) -> RewardSource:
    from maporl.rewards.functions import CompletionReward  # needs torch

    return CompletionReward(function)


def find_source(name: str, where: str = "reward.sources", pays: Collection[str] = ()) -> Builder:
    """Return what builds the source ``name``: one of :data:`SOURCES`, or ``MODULE:OBJECT``.

    A source of the user's own is a function ``(dialogues, task)``, a class that derives from
    :class:`maporl.RewardSource` and takes no arguments, or a function with the signature of TRL's ``GRPOTrainer``
    (:func:`is_completion_reward`). ``pays`` are the names of rewards that need no source, for errors.

    Raises:
        ConfigError: no source has this name, or the object is something else. The message begins with ``where``.
    """
    if name in SOURCES:
        return SOURCES[name]
    source: Any = look_up(name, dict.fromkeys([*SOURCES, *pays]), where)
    if isinstance(source, RewardSource):
        return lambda section, voices: source
    if is_completion_reward(source):
        return lambda section, voices: _completion_reward(source)
    if not isinstance(source, type):
        must_take(source, ("dialogues", "task"), f"{where}: {name}")
        return lambda section, voices: FunctionSource(source)
    if not issubclass(source, RewardSource):
        raise ConfigError(f"{where}: {name}: expected f(dialogues, task) or a RewardSource, got {kind_of(source)}")
    try:
        signature(source).bind()
    except TypeError:
        raise ConfigError(f"{where}: {name}: expected a class without arguments, got {signature(source)}") from None
    return lambda section, voices: source()


Nll = Callable[[list[Utterance]], list[float]]
"""``utterances -> numbers``: the mean negative log-probability of each utterance's tokens after what its agent saw, in
nats a token, under the weights with which its policy began."""


def asks_untrained(restate: str, sources: Collection[str]) -> str | None:
    """Return the option that asks the weights before training, or None. They are then kept in memory.

    >>> asks_untrained("off", ["label", "nll"]), asks_untrained("off", ["label"])
    ('reward.sources: nll', None)
    """
    if restate == "base_model":
        return "restate: base_model"
    return "reward.sources: nll" if "nll" in sources else None
