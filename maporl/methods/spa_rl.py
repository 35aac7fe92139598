"""SPA-RL: an estimate of progress as the reward of each step (arXiv 2505.20732). No torch."""

from dataclasses import dataclass

from maporl.rewards.rules import Along, Credits, Rule, along_names, named_reward, split_name
from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Redistribute(Rule):
    """Every utterance gets ``alpha`` times the reward ``by``, an estimate of progress (SPA-RL, arXiv 2505.20732)."""

    by: str = option(help="The name of the reward.")
    alpha: float = option(1.0, "Its weight.")
    grounding: str | None = option(None, "The name of another reward that is added.")
    beta: float = option(0.5, "The weight of that one.")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(split_name(name)[1] for name in (self.by, self.grounding) if name is not None)

    @property
    def along(self) -> Along:  # type: ignore[override]  # it follows from the options
        """What the credit of an utterance depends on."""
        return along_names(self.by, self.grounding or "")

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        def step(d: Dialogue, u: Utterance) -> float:
            ground = self.beta * named_reward(d, u, self.grounding) if self.grounding else 0.0
            return self.alpha * named_reward(d, u, self.by) + ground

        return [{u.id: step(d, u) for u in d.utterances} for d in dialogues]
