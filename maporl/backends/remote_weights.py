"""Weights of other times, which the processes of the groups hold: those of past opponents, and those before
training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from maporl.backends.group import LearnerGroup
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.team.agents import Policy
from maporl.team.past_policies import PastPolicies, past_name
from maporl.team.team import Team


class Groups(Protocol):
    """The groups of a run: :class:`maporl.RayBackend`."""

    def give(self, policy: str, weights: Any) -> None:
        """Let a policy speak with ``weights``, a handle, from now on."""
        ...

    def last_sent(self, policy: str) -> Any:
        """Return a handle of the weights that a trained policy has sent last."""
        ...

    def group_of(self, policy: str) -> LearnerGroup:
        """Return the group that trains a policy."""
        ...

    def ask_untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights` in the group of a policy."""
        ...


class RemotePast(PastPolicies):
    """Past opponents. A snapshot is a handle of weights that were sent, and never comes to this process.

    Args:
        section: which agent has past opponents, and how often.
        team: the team, which gets the frozen policy.
        seed: the seed that chooses the updates and the snapshots.
        groups: the groups, which hold the weights.
    """

    def __init__(self, section: OpponentPool, team: Team, seed: int, groups: Groups):
        self.groups = groups
        super().__init__(section, team, seed)

    def _frozen(self) -> Policy:
        """Return the frozen policy with the text side alone. The engines of the group have a model for it."""
        policy = self.policy
        voice = replace(policy.voice, name=past_name(policy.name))
        return Policy(voice, policy.model, policy.adapter, False, agents=[self.section.agent])

    def take_snapshot(self) -> None:
        """Keep the weights that the policy has sent last, which are its present ones."""
        present = self.groups.last_sent(self.policy.name)
        self.snapshots = [*self.snapshots, present][-self.section.keep :]

    def save(self, folder: Path) -> None:
        """Save every snapshot to ``folder``, for a checkpoint."""
        group = self.groups.group_of(self.policy.name)
        for number, weights in enumerate(self.snapshots):
            group.all("save_weights", self.policy.name, weights, folder / f"snapshot-{number}.safetensors")

    def _read(self, files: list[Path]) -> None:
        group = self.groups.group_of(self.policy.name)
        self.snapshots = [group.kept("read_weights", self.policy.name, file) for file in files]

    def _load(self, weights: Any) -> None:
        self.groups.give(self.past.name, weights)


class RemoteUntrained(UntrainedWeights):
    """The weights before training, which the groups of the policies hold.

    Args:
        team: the policies, for their tokenizers.
        groups: the groups, which hold the weights.
    """

    def __init__(self, team: Team, groups: Groups):
        self.team, self.groups = team, groups

    def logprobs(self, policy: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Return the log-probability of each completion after its prompt (:meth:`UntrainedWeights.logprobs`)."""
        return self.groups.ask_untrained("logprobs", policy, rows)

    def complete(self, policy: str, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return the ids of the greedy completion of each prompt (:meth:`UntrainedWeights.complete`)."""
        return self.groups.ask_untrained("complete", policy, prompts, most)
