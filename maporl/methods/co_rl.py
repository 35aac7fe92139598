"""Co-RL: models teach each other, each paid for agreeing with what most answers of another one say (2608.17253).

No torch.
"""

from maporl.config.schema import RewardSection
from maporl.rewards.base import FunctionSource, RewardSource, Values
from maporl.rewards.build import Voices
from maporl.rewards.labels import agreement
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance


def peer_majority(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for an answer that agrees with most of another agent's last answers to the question, and 0 otherwise.

    That agent is the next one by name, and the first one for the last (a ring; Co-RL, arXiv 2608.17253). No label is
    read, and no agent votes for itself. What is said of ties and unreadable answers in
    :func:`maporl.rewards.labels.majority` holds here too. An agent alone is its own teacher (TTRL).
    """

    def teacher(d: Dialogue, u: Utterance) -> str:
        names = sorted({v.agent for v in d.utterances if v.answers})
        return names[(names.index(u.agent) + 1) % len(names)]

    return agreement(dialogues, task, lambda d, u: u.agent, teacher)


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the source ``peer_majority``: whether an answer agrees with most answers of another agent."""
    return FunctionSource(peer_majority, answers_only=True, compares=True)
