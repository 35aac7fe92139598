"""WideSeek-R1: of a dialogue that failed, only the end is trained on (arXiv 2602.04634)."""

from dataclasses import dataclass

from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import Transform
from maporl.rounding import exceeds
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class EndOfFailures(Transform):
    """Of a dialogue that earned no more than ``above``, only the last utterance is trained on (WideSeek-R1, arXiv
    2602.04634).

    A KL in the reward does not count in what it earned.

    It is the last one that nobody called; where callers are not recorded, nobody was called. What was said before it
    may have been good, and the end alone may have spoilt the dialogue, such as an answer in no form that can be read.
    All rows still count in the statistics of groups. Where ``equal_shares`` follows, its shares are those of the rows
    that stay.
    """

    above: float = option(0.0, "What a dialogue must earn more than to be trained on as a whole.")
    needs = ("rollout", "order")
    compares_turns = True

    def weigh_after(self, advantages: Tensor, weights: Tensor, batch: TurnBatch) -> Tensor:
        """Return 0 for all rows of a failure but its last one.

        Raises:
            ValueError: a column was not recorded.
        """
        result = weights.clone()
        for rows in batch.trajectories(by_agent=False):
            main = [i for i in rows if not batch.called(i)]
            if main and not any(exceeds(batch.earned[i], self.above) for i in rows):
                result[[i for i in rows if i != main[-1]]] = 0.0
        return result
