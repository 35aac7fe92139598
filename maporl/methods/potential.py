"""Potential-based shaping: hints on the way that cannot change what is best (Ng, Harada and Russell 1999). No torch."""

from dataclasses import dataclass

from maporl.rewards.rules import Credits, Rule
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Potential(Rule):
    """Adds ``gamma`` times the potential after an utterance, minus the potential before it.

    The potential after an utterance is its reward ``of``, times ``weight``. It is 0 before an agent's first utterance
    and after its last one, so over an agent's utterances the additions sum to 0, and so they do discounted by
    ``gamma``. Which policy is best therefore stays as it is, if an utterance is trained on the sum of its agent's
    credits from it on (such as ``advantage.returns: reward_to_go``) with ``advantage.gamma`` equal to ``gamma``.

    An utterance without the reward has the potential 0.
    """

    of: str = option(help="The name of the reward that is the potential.")
    gamma: float = option(1.0, "The discount; the same as `advantage.gamma`.")
    weight: float = option(1.0, "What the reward is multiplied by.")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.of})

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            last = {u.agent: u.id for u in dialogue.utterances}
            before: dict[str, float] = {}
            shaped = dict(credit)
            for u in dialogue.utterances:
                after = 0.0 if u.id == last[u.agent] else self.weight * u.rewards.get(self.of, 0.0)
                shaped[u.id] = credit.get(u.id, 0.0) + self.gamma * after - before.get(u.agent, 0.0)
                before[u.agent] = after
            result.append(shaped)
        return result
