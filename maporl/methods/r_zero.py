"""R-Zero: how far a proposed question repeats others of its batch (arXiv 2508.05004). No torch."""

from collections.abc import Sequence
from importlib.util import find_spec

from maporl.config.schema import RewardSection
from maporl.errors import ConfigError, install_command
from maporl.rewards.base import RewardSource, Values
from maporl.rewards.build import Voices
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance
from trl_ext.process import distributed

FARTHEST = 0.5
"""Two clusters become one while their mean distance, 1 - BLEU, is at most this (R-Zero's code)."""


class Repeats(RewardSource):
    """The share of the batch's proposals that are in a proposal's cluster, in (0, 1]. Give it a negative weight.

    Proposals are clustered by average linkage on the distance 1 - BLEU. A proposal that holds no question is compared
    by its words. The batch is what all processes play in an update, without questions that were replaced
    (``branching.resample``). Branchings that compare answers while a question is played are refused. A proposer that is
    paid for hard questions alone writes one hard question again and again, which this prevents.

    Source: R-Zero, arXiv 2508.05004. Its code takes another library's BLEU, so distances differ a little.

    Raises:
        ConfigError: a package that it needs is not installed.
    """

    answers_only = False
    compares = True

    def __init__(self) -> None:
        for package in ("sacrebleu", "scipy"):
            if find_spec(package) is None:
                raise ConfigError(
                    f"reward.sources: repeats needs the package {package}; install it with: "
                    f"{install_command('novelty')}"
                )
        self._met: tuple[Dialogue | None, list[str]] = (None, [])
        """A dialogue of the update, and what the other processes proposed in it."""

    def meet(self, dialogues: list[Dialogue]) -> None:
        """Learn what the other processes have proposed."""
        parts = distributed.all_gather([_compared(u) for u in _proposals(dialogues)])
        del parts[distributed.rank()]
        self._met = (dialogues[0] if dialogues else None, [text for part in parts for text in part])

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the share of each proposal, and None for other utterances."""
        update, others = self._met
        elsewhere = others if any(d is update for d in dialogues) else []
        shares = iter(cluster_shares([*(_compared(u) for u in _proposals(dialogues)), *elsewhere]))
        return [[next(shares) if _proposes(u) else None for u in d.utterances] for d in dialogues]


def _proposes(utterance: Utterance) -> bool:
    return utterance.tags.keys() >= {"question", "accepted"}


def _proposals(dialogues: list[Dialogue]) -> list[Utterance]:
    return [u for d in dialogues for u in d.utterances if _proposes(u)]


def _compared(proposal: Utterance) -> str:
    return proposal.tags["question"] or proposal.text


def cluster_shares(texts: Sequence[str]) -> list[float]:
    """Return for each text the share of ``texts`` that are in its cluster. Their order does not matter."""
    from sacrebleu.metrics.bleu import BLEU
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(texts) < 2:
        return [1.0] * len(texts)
    numbers = sorted(range(len(texts)), key=lambda i: texts[i])  # of equally near clusters the first ones are joined
    ordered = [texts[i] for i in numbers]
    bleu = BLEU(effective_order=True)  # as sentences need it
    distances = [
        0.0 if text == other else 1 - bleu.sentence_score(text, [other]).score / 100  # short texts have no BLEU of 1
        for number, text in enumerate(ordered)
        for other in ordered[number + 1 :]
    ]
    clusters = fcluster(linkage(distances, "average"), FARTHEST, "distance").tolist()
    shares = {i: clusters.count(cluster) / len(texts) for i, cluster in zip(numbers, clusters, strict=True)}
    return [shares[i] for i in range(len(texts))]


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the source ``repeats``: how far a proposed question repeats others of its batch (R-Zero)."""
    return Repeats()
