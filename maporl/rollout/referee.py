"""The contract of a referee, which sees the new utterances of each step before the next step begins."""

from maporl.types import Dialogue


class Referee:
    """Sees the dialogues of a step one at a time, and may collect them. It must be done with them after :meth:`settle`.

    This base class does nothing. :class:`maporl.rollout.player.ScoringReferee` grades, scores and restates answers.
    """

    batches: bool = False
    """Whether it does work that takes batches, so that all dialogues should take their steps together."""

    def see(self, dialogue: Dialogue) -> None:
        """Receive a dialogue that holds only its new utterances."""

    def settle(self) -> None:
        """Fill in grades and rewards of all utterances that were seen since the last call, in one batch."""
