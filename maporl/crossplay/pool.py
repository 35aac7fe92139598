"""The agents of all runs that take part. Weights are loaded once, and dropped when no team needs them any more."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from maporl.config.schema import AgentSection, RewardSection
from maporl.crossplay.entrants import Entrant
from maporl.rewards.base import RewardSource
from maporl.rewards.likelihood import asks_untrained
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.run import ResolvedRun
from maporl.runs.build import player_of, ready_to_play
from maporl.team.agents import Agent
from maporl.team.loading import Bases, base_key, load_agents, load_tokenizers
from maporl.team.team import Team
from maporl.team.weights import load_trained_weights

Weights = tuple[int, str]
"""Weights that are loaded together: the number of the run, and the policy's name in its configuration."""


@dataclass(frozen=True)
class Loaded:
    """Agents that speak with the same weights, by name, and what restates their answers."""

    agents: dict[str, Agent]
    untrained: UntrainedWeights | None


class AgentPool:
    """The agents of all runs. Weights are loaded when a team first needs them, and dropped after the last such team.

    Adapters on the same model share one base, also between runs.

    Args:
        entrants: the runs.
        device: where the models are.
    """

    def __init__(self, entrants: Sequence[Entrant], device: torch.device):
        self.entrants, self.device = entrants, device
        self.tokenizers = [load_tokenizers(entrant.config) for entrant in entrants]
        protocol = ResolvedRun(entrants[0].config).protocol
        self._scored = bool(protocol.between_turns()) or protocol.score_between_turns
        self.loaded: dict[Weights, Loaded] = {}
        self._bases: Bases = {}

    def player(self, cast: Mapping[str, int], sources: Mapping[str, RewardSource] | None) -> Player:
        """Return a player of the team in which each agent comes from the run that ``cast`` gives.

        ``sources`` are the reward sources of an earlier player, or None.
        """
        config = self.entrants[0].config
        loaded = {name: self._load_once(self._weights(name, run)) for name, run in cast.items()}
        team = Team([entry.agents[name] for name, entry in loaded.items()])
        sections = {name: self._sections(self._weights(name, run))[name] for name, run in cast.items()}
        # an evaluation needs no verifier, unless the protocol shows scores or decides by them
        reward = config.reward if self._scored else RewardSection()
        by_policy = {
            p: entry.untrained for entry in loaded.values() if entry.untrained for p in entry.untrained.team.policies
        }
        rows = config.ppo.batch_rows
        untrained = UntrainedWeights(team, lambda p: by_policy[p].model_of(p), rows) if by_policy else None
        return player_of(
            ResolvedRun(dataclasses.replace(config, agents=sections, reward=reward)), team, untrained, sources
        )

    def keep(self, casts: Sequence[Mapping[str, int]]) -> None:
        """Drop all weights that the teams ``casts`` do not need."""
        needed = {self._weights(name, run) for cast in casts for name, run in cast.items()}
        self.loaded = {weights: entry for weights, entry in self.loaded.items() if weights in needed}
        bases = {base_key(section) for weights in needed for section in self._sections(weights).values()}
        self._bases = {key: model for key, model in self._bases.items() if key in bases}

    def _weights(self, name: str, run: int) -> Weights:
        return run, self.entrants[run].config.agents[name].policy or name

    def _sections(self, weights: Weights) -> dict[str, AgentSection]:
        """Return the sections of the agents that speak with ``weights``, under a policy name that no other run has."""
        run, policy = weights
        sections = {}
        for name, section in self.entrants[run].config.agents.items():
            if (section.policy or name) == policy:
                local: dict[str, Any] = {"engine": "transformers", "vllm": None} if section.weights else {}
                sections[name] = dataclasses.replace(section, policy=_prefix(run, policy), **local)
        return sections

    def _load_once(self, weights: Weights) -> Loaded:
        if weights not in self.loaded:
            self.loaded[weights] = self._load(weights)
        return self.loaded[weights]

    def _load(self, weights: Weights) -> Loaded:
        run, _ = weights
        entrant = self.entrants[run]
        config = dataclasses.replace(entrant.config, agents=self._sections(weights))
        agents = load_agents(config, self.tokenizers[run], bases=self._bases)
        team = Team(agents)
        rows = config.ppo.batch_rows
        untrained = (
            UntrainedWeights.before_training(team, rows)
            if asks_untrained(config.restate, config.reward.asked)
            else None
        )
        load_trained_weights({name.removeprefix(_prefix(run)): p for name, p in team.policies.items()}, entrant.folder)
        ready_to_play(team, self.device)
        return Loaded({agent.name: agent for agent in agents}, untrained)


def _prefix(run: int, policy: str = "") -> str:
    return f"run{run + 1}-{policy}"
