"""Rewards by name: those of an utterance, of the one that called it, or of those that it called.

Pure Python, no torch.
"""

from statistics import fmean

from maporl.rewards.rule import Along
from maporl.types import Dialogue, Utterance


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
