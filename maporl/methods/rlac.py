"""RLAC: a critic names the likeliest fault, a validator says whether it is one, and one of the two wins (2511.01758).

No torch.
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from maporl.rewards.rules import Credits, Rule, identity
from maporl.rounding import difference
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Refute(Rule):
    """Pays a valid test that the program fails 1, and the program 1 minus the mean of what its tests earn (RLAC, arXiv
    2511.01758).

    Several tests of one utterance earn the share that is ``valid`` minus the share that the program ``passed``, at
    least 0: no fewer of them are valid and fail. In the protocol ``code`` a test is valid if the reference solution
    passes it. The mean is over all dialogues that share the program, as with ``fork_every``. Other utterances have no
    credit.
    """

    valid: str = option("tests", "The reward of tests that is the share of valid ones.")
    passed: str = option("agree", "The reward of tests that is the share that the program passes.")

    along = "question"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.valid, self.passed})

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        paid: Credits = [{} for _ in dialogues]
        withstood: dict[tuple, list[float]] = defaultdict(list)
        tried: list[tuple[int, int, tuple]] = []
        for number, dialogue in enumerate(dialogues):
            for u in (u for u in dialogue.utterances if self.valid in u.rewards and self.passed in u.rewards):
                paid[number][u.id] = max(0.0, difference(u.rewards[self.valid], u.rewards[self.passed]))
                for shown in u.parents:
                    name = identity(dialogue, dialogue.utterances[shown])
                    withstood[name].append(1 - paid[number][u.id])
                    tried.append((number, shown, name))
        for number, shown, name in tried:
            paid[number][shown] = fmean(withstood[name])
        return paid
