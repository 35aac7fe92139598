"""Dialogues of few words, and rules that are applied to them."""

from maporl.rewards.rules import build_rules
from maporl.types import Dialogue, Example, Utterance


def dialogue(*entries, prompt=0, rollout=0):
    """A dialogue with one utterance for each entry (agent, turn, parents, options)."""
    utterances = []
    for number, (agent, turn, parents, options) in enumerate(entries):
        utterances.append(Utterance(number, agent, agent, turn, number, [], "", parents=tuple(parents), **options))
    return Dialogue(Example("e", "q", "a"), utterances, prompt=prompt, rollout=rollout)


def apply(entry, dialogues, credits):
    """What one rule of a configuration makes of the credits."""
    (rule,) = build_rules([entry])
    return rule(dialogues, credits)
