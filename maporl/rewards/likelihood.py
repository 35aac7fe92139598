"""Whether a run asks how likely what was said is to the weights before training. Imports no torch."""

from collections.abc import Callable, Collection

from maporl.types import Utterance

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
