"""Seat agents of different runs together and evaluate every team. ``maporl crossplay`` calls this."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import set_seed

from maporl.config.call_options import CallLimits
from maporl.config.schema import AgentSection, Config, RewardSection
from maporl.errors import ConfigError, RunError
from maporl.evaluation.crossplay import CrossPlay, CrossTeam, Right, final_right, seatings
from maporl.hub.pull import check_complete, read_team
from maporl.report.charts import unique_names
from maporl.report.crossplay import plot_crossplay
from maporl.report.read import CROSSPLAY
from maporl.rewards.base import RewardSource
from maporl.rewards.likelihood import asks_untrained
from maporl.rollout.player import Player
from maporl.rollout.restate import UntrainedWeights
from maporl.run import ResolvedRun
from maporl.runs.build import find_device, player_of, ready_to_play
from maporl.tasks import Task, build_task
from maporl.team.agents import Agent
from maporl.team.loading import Bases, base_key, load_agents, load_tokenizers
from maporl.team.team import Team
from maporl.team.weights import load_trained_weights
from maporl.validation.check import check
from trl_ext.files.atomic import replace_file
from trl_ext.files.paths import below
from trl_ext.process import distributed

ALIKE: dict[str, Callable[[Config], Any]] = {
    "restate": lambda config: config.restate,
    "ppo.response_length": lambda config: config.ppo.response_length,
    "ppo.stop_token": lambda config: config.ppo.stop_token,
    "ppo.stop_token_id": lambda config: config.ppo.stop_token_id,
    "ppo.stop_strings": lambda config: config.ppo.stop_strings,
    "evaluation.questions": lambda config: config.evaluation.questions,
    "evaluation.temperature": lambda config: config.evaluation.temperature,
    "evaluation.top_p": lambda config: config.evaluation.top_p,
    "evaluation.top_k": lambda config: config.evaluation.top_k,
    "evaluation.sampling": lambda config: config.evaluation.sampling,
    "tools": lambda config: config.tools,
    "environments": lambda config: config.environments,
    "agents.AGENT.tools": lambda config: {name: agent.tools for name, agent in config.agents.items()},
    "agents.AGENT.limits": lambda config: {name: agent.limits or CallLimits() for name, agent in config.agents.items()},
    "agents.AGENT.sampling": lambda config: {name: agent.sampling for name, agent in config.agents.items()},
}
"""The options that decide how an evaluation is played. They must be the same in every run."""

Weights = tuple[int, str]
"""Weights that are loaded together: the number of the run, and the policy's name in its configuration."""


@dataclass(frozen=True)
class Entrant:
    """A run that takes part: its name in tables, its configuration, and the folder of its weights.

    ``local`` is whether the folder is the user's own, and not a download from the hub.
    """

    name: str
    config: Config
    folder: Path
    local: bool


def read_entrants(given: Sequence[str], overrides: Sequence[str] = ()) -> list[Entrant]:
    """Read the runs, and check that their agents can play together. No model is loaded.

    Args:
        given: folders of runs, or names of teams on the hub.
        overrides: ``KEY=VALUE`` for the configurations of all runs.

    Raises:
        ConfigError: there are fewer than two runs, one is given twice, they do not fit each other, or a team has only
            one agent that differs between them.
        RunError: something is not a run, or it has no final weights.
    """
    if len(given) < 2:
        raise ConfigError(
            f"expected at least two runs, got {' '.join(given) or 'none'}; for a single run there is: maporl eval RUN"
        )
    entrants: list[Entrant] = []
    folders: list[Path] = []
    for one, name in zip(given, unique_names([Path(one) for one in given]), strict=True):
        config, folder = read_team(one, overrides)
        folders.append(folder.resolve())
        if (earlier := folders.index(folders[-1])) < len(entrants):
            raise ConfigError(f"{one}: is the same run as {given[earlier]}; give every run once")
        check(config, str(folder / "config.yaml"))
        check_complete(config, folder)
        entrants.append(Entrant(name, config, folder, Path(one).is_dir()))
        _check_frozen(entrants[-1])
        _check_alike(entrants[0], entrants[-1])
    seats_of(entrants)
    return entrants


def seats_of(entrants: Sequence[Entrant]) -> tuple[str, ...]:
    """Return the agents that play and whose weights or prompts differ between the runs, in speaking order.

    Raises:
        ConfigError: there are fewer than two.
    """
    playing = ResolvedRun(entrants[0].config).speakers
    if len(playing) < 2:
        raise ConfigError(f"cross-play needs teams of two agents or more, but in these runs {playing[0]!r} plays alone")
    seats = tuple(name for name in playing if _differs(name, entrants))
    if len(seats) < 2:
        raise ConfigError(
            f"cross-play needs two agents or more that differ between the runs, got {list(seats)}; the others of "
            f"{list(playing)} are frozen and equal in all runs, so all mixed teams would be teams that trained together"
        )
    return seats


def _differs(name: str, entrants: Sequence[Entrant]) -> bool:
    sections = [entrant.config.agents[name] for entrant in entrants]
    first = sections[0]
    # the random weights of a frozen tiny model depend on its run's seed
    own = first.weights and (first.trainable or first.tiny is not None)
    return own or any(section != first for section in sections)


def _check_frozen(entrant: Entrant) -> None:
    """Check that the weights of frozen tiny models, which are built at random, were saved when the run started."""
    for name, section in entrant.config.agents.items():
        kept = below(entrant.folder / "initial", section.policy or name)
        if section.tiny is not None and not section.trainable and not kept.is_dir():
            raise RunError(
                f"{entrant.folder}: agents.{name} is a frozen tiny model, and {kept} with its weights is missing; only "
                "runs with a warm start keep them"
            )


def _check_alike(first: Entrant, other: Entrant) -> None:
    """Check that ``other`` plays the same questions in the same way as ``first``, with agents of the same names.

    Raises:
        ConfigError: it does not. The message says in what they differ.
    """
    one, two = first.config, other.config

    def differ(what: str, mine: Any, theirs: Any, remedy: str) -> ConfigError:
        return ConfigError(f"{other.name}: {what} is {theirs!r}, but in {first.name} it is {mine!r}; {remedy}")

    alike = "cross-play needs runs of one task and one protocol, with agents of the same names"
    names = tuple(one.agents)
    if names != tuple(two.agents):
        raise differ("the list of agents", list(names), list(two.agents), alike)
    if _task(one, "eval", 0) != _task(two, "eval", 0):
        raise differ("task", one.task, two.task, alike)
    protocol = ResolvedRun(one).protocol
    if protocol != ResolvedRun(two).protocol:
        raise differ("protocol", one.protocol, two.protocol, alike)
    for key, value in ALIKE.items():
        if value(one) != value(two):
            raise _differ_in(key, value(one), value(two), differ)
    if not one.evaluation.questions:
        raise ConfigError("evaluation.questions is 0; give evaluation.questions=NUMBER after the runs")
    if (protocol.between_turns() or protocol.score_between_turns) and one.reward != two.reward:
        raise ConfigError(
            f"{other.name}: its reward section is not that of {first.name}, and protocol {protocol.label} shows agents their "
            "scores or decides by them; give runs with the same rewards"
        )


def _differ_in(key: str, mine: Any, theirs: Any, differ: Callable[..., ConfigError]) -> ConfigError:
    """Return the error for runs that differ in the option ``key``. Of options with names, it shows those that differ."""
    if isinstance(mine, dict):
        name = next(one for one in [*mine, *theirs] if mine.get(one) != theirs.get(one))
        key = key.replace("AGENT", name) if "AGENT" in key else f"{key}.{name}"
        mine, theirs = mine.get(name), theirs.get(name)
    return differ(key, mine, theirs, f"give {key}=VALUE after the runs, which sets it for all of them")


def _task(config: Config, split: str, seed: int | None = None) -> Task:
    """Return a split of the run's task: by the run's own seed, or by ``seed`` to compare tasks without their seeds."""
    if seed is not None:
        return build_task({key: value for key, value in config.task.items() if key != "seed"}, split, seed)
    return build_task(config.task, split, config.seed)


def shared_questions(entrants: Sequence[Entrant]) -> tuple[Task, list[int], int]:
    """Return (held-out task of the first run, numbers of the questions to ask, number of questions left out).

    Runs with different seeds may hold out different questions. Only questions that no run was trained on are asked.

    Raises:
        ConfigError: every held-out question was trained on by another run.
    """
    first = entrants[0].config
    held_out = _task(first, "eval")
    trained: set[str] = set()
    for config in (entrant.config for entrant in entrants[1:]):
        if _task(config, "eval") != held_out:
            stages = [config.task | stage.task for stage in config.schedule.curriculum]
            for section in (config.task, *stages):
                task = build_task(section, "train", config.seed)
                trained |= {task.question(example) or example.id for example in task}
    asked = [n for n, example in enumerate(held_out) if (held_out.question(example) or example.id) not in trained]
    if not asked:
        raise ConfigError(
            f"all {len(held_out)} held-out questions of {entrants[0].name} were training questions of another run, because "
            "each run's seed draws its own split; train the runs with the same task.seed"
        )
    return held_out, asked[: first.evaluation.questions], len(held_out) - len(asked)


def play_crossplay(entrants: Sequence[Entrant], most: int, quiet: bool = False) -> CrossPlay:
    """Evaluate the teams that :func:`maporl.evaluation.crossplay.seatings` names.

    All teams answer the same questions, with the same seed and at the same temperature. An agent keeps its model, its
    tokenizer, its chat template, its system prompt and its call format. Agents with weights answer by the ``transformers`` engine.

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
        return CrossPlay(names, seats, tuple(teams), config.evaluation.temperature, config.seed, left_out)
    except ValueError as error:
        raise RunError(f"cross-play of {', '.join(names)}: {error}") from None


def _play_team(
    pool: "AgentPool",
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
        self.loaded: dict[Weights, Loaded] = {}
        self._bases: Bases = {}

    def player(self, cast: Mapping[str, int], sources: Mapping[str, RewardSource] | None) -> Player:
        """Return a player of the team in which each agent comes from the run that ``cast`` gives.

        ``sources`` are the reward sources of an earlier player, or None.
        """
        config = self.entrants[0].config
        protocol = ResolvedRun(config).protocol
        loaded = {name: self._load_once(self._weights(name, run)) for name, run in cast.items()}
        team = Team([own.agents[name] for name, own in loaded.items()])
        sections = {name: self._sections(self._weights(name, run))[name] for name, run in cast.items()}
        scored = protocol.between_turns() or protocol.score_between_turns
        reward = config.reward if scored else RewardSection()  # an evaluation needs no verifier
        by_policy = {p: own.untrained for own in loaded.values() if own.untrained for p in own.untrained.team.policies}
        rows = config.ppo.local_rollout_forward_batch_size
        untrained = UntrainedWeights(team, lambda p: by_policy[p].model_of(p), rows) if by_policy else None
        return player_of(
            ResolvedRun(dataclasses.replace(config, agents=sections, reward=reward)), team, untrained, sources
        )

    def keep(self, casts: Sequence[Mapping[str, int]]) -> None:
        """Drop all weights that the teams ``casts`` do not need."""
        needed = {self._weights(name, run) for cast in casts for name, run in cast.items()}
        self.loaded = {weights: own for weights, own in self.loaded.items() if weights in needed}
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
        rows = config.ppo.local_rollout_forward_batch_size
        untrained = (
            UntrainedWeights.before_training(team, rows)
            if asks_untrained(config.restate, config.reward.sources)
            else None
        )
        load_trained_weights({name.removeprefix(_prefix(run)): p for name, p in team.policies.items()}, entrant.folder)
        ready_to_play(team, self.device)
        return Loaded({agent.name: agent for agent in agents}, untrained)


def _prefix(run: int, policy: str = "") -> str:
    return f"run{run + 1}-{policy}"


def write_crossplay(play: CrossPlay, entrants: Sequence[Entrant], output: Path | None) -> list[Path]:
    """Write the result and its picture to ``output``, by default to the folder of every run that is not a download.

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
        files += [folder / CROSSPLAY, plot_crossplay(play, folder)]
    return files
