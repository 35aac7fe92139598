"""Who looks at what was just said, before anybody speaks again."""

from maporl.types import Dialogue


class Referee:
    """Sees one dialogue at a time, and may collect them: what it has to say of them must be said once :meth:`settle` returns.

    This one says nothing; :class:`maporl.rollout.player.ScoringReferee` grades, scores and restates.
    """

    def see(self, dialogue: Dialogue) -> None:
        """Take in the new utterances of a dialogue: ``dialogue`` holds no others."""

    def settle(self) -> None:
        """Fill in grades and rewards of everything seen since the last call, in one batch."""
