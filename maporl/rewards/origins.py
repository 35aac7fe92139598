"""Says whose score each credit came from, so that a record can be read. Pure Python, no torch."""

from collections.abc import Sequence
from dataclasses import replace

from maporl.config.schema import RewardSection
from maporl.rewards.credit import assign_credit
from maporl.rounding import differ
from maporl.types import Dialogue

MOST_SCORED = 64
"""The scored utterances of a dialogue up to which origins are told. Credit is assigned once more for each of them."""

Origins = dict[int, list[tuple[int, float]]]
"""For each utterance of a dialogue, the utterances whose scores are part of its credit, with those parts."""


def origins(
    dialogue: Dialogue, siblings: Sequence[Dialogue], agents: Sequence[str], reward: RewardSection, update: int
) -> Origins:
    """Return what each score of a scored ``dialogue`` adds to each credit in it: the credit minus that without it.

    The parts sum to the credit before bonus, fines and charges where rules are sums of scores. What rules add beside
    that, such as a price of words, or what they take from other dialogues of the question, is in no part.

    Args:
        dialogue: one of the ``siblings``.
        siblings: all dialogues of its question.
        agents: the agents that play, in order.
        reward: how scores become credit.
        update: the number of the update, from 1.
    """
    scores = replace(reward, penalties=None, bonus=None, charges={})
    place = next(number for number, sibling in enumerate(siblings) if sibling is dialogue)

    def credits(without: int | None) -> dict[int, float]:
        copies = [replace(d, utterances=[replace(u, rewards=dict(u.rewards)) for u in d.utterances]) for d in siblings]
        own = copies[place].utterances
        if without is not None:
            own[without].rewards["score"] = 0.0
        assign_credit(copies, tuple(agents), scores, update=update)
        return {number: u.rewards["credit"] for number, u in enumerate(own) if "credit" in u.rewards}

    scored = [number for number, u in enumerate(dialogue.utterances) if u.rewards.get("score")]
    if not scored or len(scored) > MOST_SCORED:
        return {}
    whole = credits(None)
    parts: Origins = {number: [] for number in whole}
    for number in scored:
        for other, value in credits(number).items():
            if other in whole and differ([whole[other], value]):
                parts[other].append((number, whole[other] - value))
    return parts
