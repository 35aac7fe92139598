"""How far a proposed question repeats others of its batch (R-Zero). Imports no torch."""

from collections.abc import Sequence
from importlib.util import find_spec

from maporl.errors import ConfigError, install_command
from maporl.rewards.base import RewardSource, Values
from maporl.tasks.base import Task
from maporl.types import Dialogue

FARTHEST = 0.5
"""Two clusters become one while their mean distance, 1 - BLEU, is at most this (R-Zero's code)."""


class Repeats(RewardSource):
    """The share of the batch's proposals that are in a proposal's cluster, in (0, 1]. Give it a negative weight.

    Proposals are clustered by average linkage on the distance 1 - BLEU. A proposal that holds no question is compared by
    its words. The batch is what one process plays in an update, so that more processes see smaller batches. A proposer that is paid for hard questions alone writes
    one hard question again and again, which this prevents.

    Source: R-Zero, arXiv 2508.05004. Its code takes another library's BLEU, so distances differ a little.

    Raises:
        ConfigError: a package that it needs is not installed.
    """

    answers_only = False

    def __init__(self) -> None:
        for package in ("sacrebleu", "scipy"):
            if find_spec(package) is None:
                raise ConfigError(
                    f"reward.sources: repeats needs the package {package}; install it with: {install_command('novelty')}"
                )

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the share of each proposal, and None for other utterances."""
        proposals = [u for d in dialogues for u in d.utterances if u.tags.keys() >= {"question", "accepted"}]
        shares = iter(cluster_shares([u.tags["question"] or u.text for u in proposals]))
        return [
            [next(shares) if u.tags.keys() >= {"question", "accepted"} else None for u in d.utterances]
            for d in dialogues
        ]


def cluster_shares(texts: Sequence[str]) -> list[float]:
    """Return for each text the share of ``texts`` that are in its cluster."""
    from sacrebleu.metrics.bleu import BLEU
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(texts) < 2:
        return [1.0] * len(texts)
    bleu = BLEU(effective_order=True)  # as sentences need it
    distances = [
        0.0 if text == other else 1 - bleu.sentence_score(text, [other]).score / 100  # short texts have no BLEU of 1
        for number, text in enumerate(texts)
        for other in texts[number + 1 :]
    ]
    clusters = fcluster(linkage(distances, "average"), FARTHEST, "distance").tolist()
    return [clusters.count(own) / len(texts) for own in clusters]
