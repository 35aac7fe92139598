"""Counts the utterances of learning agents that have no credit, and stops a run in which an agent never learns.

An utterance without a credit is not trained on. That is easily overlooked: if a protocol forgets the ``parents`` of an
ask, the agent whose words were shown goes on speaking and learns nothing.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from maporl.rewards.base import RewardFailure, where
from maporl.schedules import Plan
from maporl.training.samples import Name, TeamUpdateBatch, may_learn, names_of
from maporl.types import Dialogue, Utterance
from trl_ext.learning.metrics import Metrics
from trl_ext.process import distributed

logger = logging.getLogger(__name__)

Speaker = tuple[str, str, str | None]
"""A policy, an agent that it speaks for, and the role in which the agent spoke."""


@dataclass
class Count:
    """How many utterances have a credit, how many have none, and where the first of these is and why."""

    credited: int = 0
    uncredited: int = 0
    first: str = ""

    def add(self, other: "Count") -> None:
        """Add what another process counted."""
        self.credited += other.credited
        self.uncredited += other.uncredited
        self.first = self.first or other.first


class UntrainedCounter:
    """Counts, over all processes, which utterances of an update could be trained on but have no credit.

    Args:
        rules: whether ``reward.rules`` assign the credit, for messages.
        sources: the names of the reward sources that may score anything that is said, and are the user's own.
    """

    def __init__(self, rules: bool, sources: Collection[str] = ()):
        self.rules, self.sources = rules, tuple(sources)
        self.credited: set[str] = set()
        """The agents that had a credit in some update. They are part of checkpoints."""

    def measure(self, batch: TeamUpdateBatch, policies: Collection[str]) -> Metrics:
        """Return the shares of each policy's utterances that have no credit. All processes call this together.

        Raises:
            RewardFailure: no utterance of an agent has a credit in the first update that would train it.
        """
        counts: dict[Speaker, Count] = {}
        for process_counts in distributed.all_gather(count_credits(batch.dialogues, policies, batch.plan)):
            for speaker, count in process_counts.items():
                counts.setdefault(speaker, Count()).add(count)
        if batch.number == 1 and distributed.is_main():
            for (source, speaker), readers in replaced(batch.dialogues, () if self.rules else self.sources).items():
                logger.warning(
                    "%s scores what %s says, and that takes the place of the mean credit of those who are shown it "
                    "(%s). If it is a price and that credit should stay, move it to reward.charges: {%s: {roles: [%s], "
                    "weight: 0.01}}; reward.rules: [{back_propagate: {keep_own: true}}] gives both",
                    *(source, speaker, ", ".join(readers), source, speaker),
                )
        self._must_learn(counts, batch.number)
        for (_, agent, _), count in counts.items():
            for name, number in (("credited", count.credited), ("uncredited", count.uncredited)):
                key = f"agent/{agent}/{name}"
                batch.counts[key] = batch.counts.get(key, 0.0) + number
        return shares(counts)

    def _must_learn(self, counts: dict[Speaker, Count], update: int) -> None:
        self.credited |= {agent for (_, agent, _), count in counts.items() if count.credited}
        never = [agent for agent in dict.fromkeys(agent for _, agent, _ in counts) if agent not in self.credited]
        if not never:
            return
        rules = ", no rule of reward.rules credited them" if self.rules else ""
        raise RewardFailure(
            f"update {update}: no utterance of {'; and none of '.join(_never(agent, counts) for agent in never)} has a "
            "credit, so nothing would be learned from them. No reward source and no payment of the protocol scored "
            f"them{rules}. Name their ids in Ask.parents where the protocol shows them to an agent; or let a reward "
            "source, or the protocol (pays), score them; or credit them by a rule such as reward.rules: [last]; or do "
            "not train the agent (trainable: false)"
        )


def _never(agent: str, counts: dict[Speaker, Count]) -> str:
    """Return an agent, with its roles, the number of its utterances, and why one of them has no credit."""
    by_role = {role: count for (_, name, role), count in counts.items() if name == agent}
    roles = [repr(role) for role in by_role if role is not None]
    as_roles = f" as {', '.join(roles)}" if roles else ""
    lacking = sum(count.uncredited for count in by_role.values())
    return f"agent {agent!r}{as_roles} ({lacking} utterances; {next(iter(by_role.values())).first})"


def count_credits(dialogues: list[Dialogue], policies: Collection[str], plan: Plan) -> dict[Speaker, Count]:
    """Count the utterances that ``plan`` would train one of the ``policies`` on, with and without a credit.

    Copies of an utterance, in dialogues that were forked after it, count once. It has a credit if one of them has one.
    """
    utterances: dict[Name, tuple[Dialogue, Utterance]] = {}
    for dialogue in dialogues:
        for utterance, name in zip(dialogue.utterances, names_of(dialogue), strict=True):
            if may_learn(utterance, policies, plan) and (name not in utterances or "credit" in utterance.rewards):
                utterances[name] = (dialogue, utterance)
    counts: dict[Speaker, Count] = {}
    for dialogue, u in utterances.values():
        count = counts.setdefault((u.policy, u.agent, u.role), Count())
        if "credit" in u.rewards:
            count.credited += 1
        else:
            count.uncredited += 1
            count.first = count.first or _why(dialogue, u)
    return counts


def replaced(dialogues: list[Dialogue], sources: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """Return who would have the credit of those who are shown its words, had none of the ``sources`` scored them.

    For each source and speaker, which is a role or else an agent, these are the agents that are shown the words.
    """
    readers: dict[tuple[str, str], dict[str, None]] = {}
    for dialogue in dialogues:
        for u in (u for u in dialogue.utterances if not u.answers):
            shown = {v.agent: None for v in dialogue.utterances if u.id in v.parents and "credit" in v.rewards}
            for source in (source for source in sources if shown and source in u.rewards):
                readers.setdefault((source, u.role or u.agent), {}).update(shown)
    return {key: list(agents) for key, agents in readers.items()}


def shares(counts: dict[Speaker, Count]) -> Metrics:
    """Return ``POLICY/untrained_share``, and ``POLICY/untrained/AGENT[/ROLE]`` for agents with utterances without
    credit."""
    metrics: Metrics = {}
    for policy in dict.fromkeys(policy for policy, _, _ in counts):
        policy_counts = [count for (name, _, _), count in counts.items() if name == policy]
        lacking = sum([count.uncredited for count in policy_counts])
        credited = sum([count.credited for count in policy_counts])
        metrics[f"{policy}/untrained_share"] = lacking / (lacking + credited)
    for (policy, agent, role), count in counts.items():
        if count.uncredited:
            who = agent if role is None else f"{agent}/{role}"
            metrics[f"{policy}/untrained/{who}"] = float(count.uncredited)
    return metrics


def _why(dialogue: Dialogue, utterance: Utterance) -> str:
    readers = sorted({u.agent for u in dialogue.utterances if utterance.id in u.parents})
    place = where(dialogue, utterance)
    if utterance.tags.get("passed"):
        return f"nobody answered in the turn in which it declined, for example {place}"
    if not readers:
        return f"nobody was shown what it said, for example {place}"
    return f"those who were shown what it said have no credit either, for example {', '.join(readers)} after {place}"
