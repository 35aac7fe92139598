"""The contract of a reward rule, and what several rules share. Pure Python, no torch.

A rule is a frozen dataclass of its options. It is called with the dialogues of *one* question and their credits so far:
a dict ``{utterance id: credit}`` for each dialogue. It returns new dicts. An utterance that is missing from them is not
trained on. The rules are applied from left to right, and the first one receives the scores themselves.
"""

from statistics import fmean
from typing import ClassVar, Literal

from maporl.types import Dialogue, Utterance
from trl_ext.ppo.options import Checked

Credits = list[dict[int, float]]
Along = Literal["utterance", "turn", "dialogue", "question"]
"""What the credit of an utterance depends on: on nothing that is said after it, on its turn, on its whole dialogue, or
on all dialogues of its question."""


class Rule(Checked):
    """The base class of rules. A rule is a frozen dataclass of options that can be called.

    A derived class says with ``along`` what its credits depend on. A branching whose rewards are final refuses rules
    that look at what follows an utterance (:class:`maporl.rollout.branching.Branching`). The default is the whole
    dialogue, so that a new rule is refused rather than wrong.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """The columns that the protocol must record (:attr:`maporl.Protocol.records`)."""
    needs_verdicts: ClassVar[bool] = False
    """Whether it pays the verdicts of ``protocol.step_judge``."""
    along: ClassVar[Along] = "dialogue"
    """What the credit of an utterance depends on."""

    def at_update(self, update: int) -> "Rule":
        """Return the rule as it is in ``update``, counted from 1. By default it is this one."""
        return self

    @property
    def reads(self) -> frozenset[str]:
        """The named rewards that it reads beside the score. A source or the protocol must give each of them."""
        return frozenset()

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        """Return the changed credits of one question's ``dialogues``.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}: a rule defines __call__(dialogues, credits)")


def identity(dialogue: Dialogue, utterance: Utterance) -> tuple:
    """Return what an utterance is to all dialogues of its question that share it."""
    return (None, utterance.sample) if utterance.sample is not None else (dialogue.rollout, utterance.id)


def split_name(name: str) -> tuple[str, str]:
    """Return whose reward ``name`` means ("caller", "callees", "called" or "": its own), and the reward's name."""
    whose, _, reward = name.partition("/")
    return (whose, reward) if whose in ("caller", "callees", "called") else ("", name)


def along_names(*names: str) -> Along:
    """Return what rewards with these names depend on. Called utterances follow the utterance that calls them."""
    return "dialogue" if any(name.startswith(("callees/", "called/")) for name in names) else "utterance"


def named_reward(dialogue: Dialogue, utterance: Utterance, name: str) -> float:
    """Return a named reward of the utterance, its caller, its callees or all called utterances. Without it: 0."""
    whose, reward = split_name(name)
    if not whose:
        return utterance.rewards.get(name, 0.0)
    if whose == "caller":
        return 0.0 if utterance.caller is None else dialogue.utterances[utterance.caller].rewards.get(reward, 0.0)
    called = [u for u in dialogue.utterances if u.caller is not None]
    chosen = called if whose == "called" else [u for u in called if u.caller == utterance.id]
    values = [u.rewards[reward] for u in chosen if reward in u.rewards]
    return fmean(values) if values else 0.0
