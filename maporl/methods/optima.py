"""Optima: talk that is short and readable is paid more (arXiv 2410.08115). No torch."""

from dataclasses import dataclass

from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.rewards.base import RewardSource, Values
from maporl.rewards.build import Nll, Voices
from maporl.rewards.rules import Credits, Rule
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class LengthShare(Rule):
    """Adds ``weight`` times a dialogue's sampled tokens, as a share of those of its question's longest dialogue."""

    weight: float = option(-0.5, "What the longest dialogue gets.")

    along = "question"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        tokens = [sum(len(u.response_ids) for u in d.utterances) for d in dialogues]
        most = max(1, *tokens)
        return [
            {key: value + self.weight * count / most for key, value in credit.items()}
            for credit, count in zip(credits, tokens, strict=True)
        ]


@dataclass(frozen=True)
class Readability(Rule):
    """Adds ``weight`` divided by the largest ``nll`` of a dialogue's utterances
    (:class:`Likelihood`).

    A smaller one counts as ``least``, because words that are nearly certain would otherwise be worth more than any
    answer. A dialogue whose utterances all lack the reward keeps its credits.

    Raises:
        ValueError: ``least`` is not above 0.
    """

    weight: float = option(0.8, "What is divided by the largest `nll`.")
    least: float = option(0.1, "The smallest `nll` that counts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.least > 0:
            raise ValueError(f"least: expected a number above 0, got {self.least}")

    @property
    def reads(self) -> frozenset[str]:
        """The reward of each utterance that it reads."""
        return frozenset({"nll"})

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            nlls = [u.rewards["nll"] for u in dialogue.utterances if "nll" in u.rewards]
            added = self.weight / max(self.least, *nlls) if nlls else 0.0
            result.append({key: value + added for key, value in credit.items()})
        return result


class Likelihood(RewardSource):
    """The reward ``nll``: the mean negative log-probability of an utterance's tokens under the weights before training.

    It is high for words that a language model would not write, so it measures how hard talk is to read (Optima, arXiv
    2410.08115). Give it weight 0, and let the rule ``readability`` read it. An utterance without token ids has no
    value.
    """

    def __init__(self, nll: Nll):
        self.nll = nll

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the number of every utterance. An utterance that dialogues share is computed once."""
        shared: dict[tuple, Utterance] = {}
        for d in dialogues:
            for u in d.utterances:
                if u.policy and u.response_ids and "nll" not in u.rewards:
                    shared.setdefault(_name(d, u), u)
        nlls = dict(zip(shared, self.nll(list(shared.values())), strict=True))
        return [[nlls.get(_name(d, u)) for u in d.utterances] for d in dialogues]


def _name(dialogue: Dialogue, utterance: Utterance) -> tuple:
    if utterance.sample is not None:
        return dialogue.prompt, utterance.sample
    return dialogue.prompt, dialogue.rollout, dialogue.without, utterance.id


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return how unlikely an utterance is to the weights before training, in nats a token.

    Raises:
        ConfigError: no team plays.
    """
    if voices is None:
        raise ConfigError("reward.sources: nll asks the weights before training, which only a team that plays has")
    return Likelihood(voices.nll)
