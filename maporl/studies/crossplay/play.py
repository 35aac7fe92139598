"""Play the teams of a cross-play, and write the result to the folders of the runs."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import set_seed

from maporl.config.schema import AgentSection, RewardSection
from maporl.errors import RunError
from maporl.report.read import CROSSPLAY
from maporl.rewards.base import RewardSource
from maporl.rewards.build import asks_untrained
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.run import ResolvedRun
from maporl.runs.build import find_device, player_of, ready_to_play
from maporl.studies.crossplay.alpha_rank import with_survival
from maporl.studies.crossplay.entrants import Entrant, seats_of, shared_questions
from maporl.studies.crossplay.result import CrossPlay, CrossTeam, Right, final_right, seatings
from maporl.tasks import Task
from maporl.team.agents import Agent
from maporl.team.loading import Bases, base_key, load_agents, load_tokenizers
from maporl.team.team import Team
from maporl.team.weights import load_trained_weights
from trl_ext.files.atomic import replace_file
from trl_ext.process import distributed

# -- agents: weights are loaded once, and dropped when no team needs them any more -------------------------------------

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


# -- teams -------------------------------------------------------------------------------------------------------------


def play_crossplay(entrants: Sequence[Entrant], most: int, quiet: bool = False) -> CrossPlay:
    """Evaluate the teams that :func:`maporl.studies.crossplay.result.seatings` names.

    All teams answer the same questions, with the same seed and at the same temperature. An agent keeps its model, its
    tokenizer, its chat template, its system prompt and its call format. Agents with weights answer by the
    ``transformers`` engine.

    Args:
        entrants: the runs, as :func:`read_entrants` returns them.
        most: the number of teams up to which all of them are played.
        quiet: whether to hide the progress bar.

    Raises:
        ConfigError: no question is left that no run was trained on.
        RunError: no question's answers can be graded.
    """
    config, seats = entrants[0].config, seats_of(entrants)
    task, numbers, left_out = shared_questions(entrants)
    set_seed(config.seed)
    pool = AgentPool(entrants, find_device(config))
    casts = {runs: dict.fromkeys(config.agents, 0) | dict(zip(seats, runs, strict=True))
             for runs in seatings(len(entrants), len(seats), most)}  # fmt: skip
    waiting = list(casts)
    teams, sources = [], None
    with tqdm(casts.items(), desc="teams", disable=quiet, leave=False, dynamic_ncols=True) as bar:
        for runs, cast in bar:
            right, sources = _play_team(pool, cast, sources, task, numbers)
            teams.append(CrossTeam(runs, right))
            waiting.remove(runs)
            pool.keep([casts[later] for later in waiting])
    names = tuple(entrant.name for entrant in entrants)
    try:
        played = CrossPlay(names, seats, tuple(teams), config.evaluation.temperature, config.seed, left_out)
    except ValueError as error:
        raise RunError(f"cross-play of {', '.join(names)}: {error}") from None
    return with_survival(played)


def _play_team(
    pool: AgentPool,
    cast: Mapping[str, int],
    sources: Mapping[str, RewardSource] | None,
    task: Task,
    numbers: Sequence[int],
) -> tuple[Right, Mapping[str, RewardSource]]:
    """Return a team's results, and the reward sources, which the next team can use again."""
    config = pool.entrants[0].config
    player = pool.player(cast, sources)
    dialogues = player.play_evaluation(task, numbers, config.evaluation.decoding, config.seed)
    shares = distributed.all_gather([final_right(dialogue) for dialogue in dialogues])
    return tuple(share for part in shares for share in part), player.scorer.sources


def write_crossplay(play: CrossPlay, entrants: Sequence[Entrant], output: Path | None) -> list[Path]:
    """Write the result to ``output``, by default to the folder of every run that is not a download.

    A run's report shows the result that lies in the run's folder. An earlier result is replaced.

    Returns:
        The files.
    """
    if not distributed.is_main():
        return []
    files = []
    for folder in [output] if output is not None else [entrant.folder for entrant in entrants if entrant.local]:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / CROSSPLAY, json.dumps(play.to_json(), indent=1))
        files.append(folder / CROSSPLAY)
    return files
