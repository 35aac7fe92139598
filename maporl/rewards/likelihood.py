"""How likely what was said is to the weights before training. Imports no torch."""

from collections.abc import Callable, Collection

from maporl.rewards.base import RewardSource, Values
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance

Nll = Callable[[list[Utterance]], list[float]]
"""``utterances -> numbers``: the mean negative log-probability of each utterance's tokens after what its agent saw, in
nats a token, under the weights with which its policy began."""


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


def asks_untrained(restate: str, sources: Collection[str]) -> str | None:
    """Return the option that asks the weights before training, or None. They are then kept in memory.

    >>> asks_untrained("off", ["label", "nll"]), asks_untrained("off", ["label"])
    ('reward.sources: nll', None)
    """
    if restate == "base_model":
        return "restate: base_model"
    return "reward.sources: nll" if "nll" in sources else None


def _name(dialogue: Dialogue, utterance: Utterance) -> tuple:
    if utterance.sample is not None:
        return dialogue.prompt, utterance.sample
    return dialogue.prompt, dialogue.rollout, dialogue.without, utterance.id
