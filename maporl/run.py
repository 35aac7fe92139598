"""The resolved run: a configuration with the parts that it describes, each of which is built once. Imports no torch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from maporl.config import Config, validated
from maporl.config.agents import place_of
from maporl.config.algorithm import OF_TEAM, alike
from maporl.config.schema import TinySection
from maporl.decoding import Sampling, TeamSampling
from maporl.environments.build import TeamTools
from maporl.errors import ConfigError, Fault
from maporl.protocols import Protocol, build_protocol, speakers
from maporl.tasks import Task, build_task


@dataclass(frozen=True, eq=False)
class ResolvedRun:
    """A configuration with its components, which checks, training, evaluation, play and plans read.

    A part is built when it is first asked for, and is the same object from then on. So a fault in a section is raised
    where its part is first read, and a command builds only what it needs.

    Args:
        config: the configuration. It does not change afterwards.
        where: where it comes from, with which messages begin.
        made: by name, parts that a Python program has made, in place of those that the configuration describes as well
            as one can. With ``tools`` the run has one world, which the program closes.
    """

    config: Config
    where: str = "configuration"
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vars(self).update(self.made)  # where a cached property keeps what it builds

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of all agents, in the order of the configuration."""
        return tuple(self.config.agents)

    @cached_property
    def protocol(self) -> Protocol:
        """The protocol.

        Raises:
            ConfigError: no protocol has this name, an option is wrong, or these agents cannot play it.
        """
        return build_protocol(self.config.protocol, self.agents, self.where)

    @cached_property
    def speakers(self) -> tuple[str, ...]:
        """The agents that play, in order: those of ``protocol.agents``, by default all, and the protocol's helpers."""
        return speakers(self.config.protocol, self.agents, self.protocol)

    @cached_property
    def learners(self) -> dict[str, str | None]:
        """The agents that play and are trained, with their own roles."""
        playing = {name: self.config.agents[name] for name in self.speakers}
        return {name: agent.role for name, agent in playing.items() if agent.trainable and agent.weights}

    @cached_property
    def tinies(self) -> dict[str, TinySection]:
        """The tiny models of the agents that play, by agent."""
        sections = {name: self.config.agents[name].tiny for name in self.speakers}
        return {name: tiny for name, tiny in sections.items() if tiny is not None}

    @cached_property
    def sampling(self) -> TeamSampling:
        """How the team is sampled, where this differs from the run.

        Raises:
            ConfigError: ``protocol.sampling`` is wrong.
        """
        sections = {name: agent.sampling for name, agent in self.config.agents.items()}
        agents = {name: sampling for name, sampling in sections.items() if sampling is not None}
        return TeamSampling(agents, self._role_sampling(), dict(self.config.evaluation.sampling))

    def _role_sampling(self) -> dict[str, Sampling]:
        """Return the sampling of each role that ``protocol.sampling`` names."""
        where = f"{self.where}: protocol.sampling"
        roles = self.config.protocol.get("sampling") or {}
        if not isinstance(roles, dict) or not all(isinstance(values, dict) for values in roles.values()):
            raise ConfigError(
                f"{where}: expected roles with their values, as {{solver: {{temperature: 0.7}}}}, got {roles!r:.80}"
            )
        return {str(role): validated(Sampling, dict(values), f"{where}.{role}") for role, values in roles.items()}

    @cached_property
    def task(self) -> Task:
        """The training split.

        Raises:
            ConfigError: it is empty or cannot be read.
        """
        task = build_task(self.config.task, "train", self.config.seed, self.where)
        if len(task) == 0:
            raise ConfigError("task: the training split is empty")
        return task

    @cached_property
    def held_out(self) -> Task | None:
        """The evaluation split, or None if ``evaluation.questions`` is 0.

        Raises:
            ConfigError: it is empty or cannot be read.
        """
        if not self.config.evaluation.questions:
            return None
        held_out = build_task(self.config.task, "eval", self.config.seed, self.where)
        if len(held_out) == 0:
            raise ConfigError("task: the evaluation split is empty; set evaluation.questions to 0 to do without")
        return held_out

    @property
    def splits(self) -> list[Task]:
        """The training split, and the evaluation split if there is one."""
        return [split for split in (self.task, self.held_out) if split is not None]

    @cached_property
    def curriculum(self) -> list[tuple[int, Task]]:
        """The tasks of ``schedule.curriculum``, with the update from which each is asked.

        Raises:
            ConfigError: one cannot be read.
        """
        return [
            (
                stage.update,
                build_task(
                    self.config.task | stage.task,
                    "train",
                    self.config.seed,
                    f"{self.where}: schedule.curriculum, update {stage.update}",
                ),
            )
            for stage in self.config.schedule.curriculum
        ]

    def by_algorithm(self) -> "list[ResolvedRun]":
        """Return the run as the learners of each algorithm see it: theirs in place of the team's sections, and nobody
        else in ``learners``. Where no agent has an algorithm of its own this is the run itself."""
        learns = {name: self.config.agents[name].learns_by for name in self.learners}
        if all(own == OF_TEAM for own in learns.values()):
            return [self]
        runs = []
        for names in alike(learns):
            own = copy.copy(self)
            vars(own).update(config=self.config.of(names[0]), learners={name: self.learners[name] for name in names})
            runs.append(own)
        return runs

    def key(self, key: str) -> str:
        """Return where the value of an option of the team stands that the learners here have: in their algorithm or
        there."""
        return next((place_of(name, key, self.config) for name in self.learners), key)

    def open_tools(self) -> TeamTools:
        """Return the tools and environments for those who play, in a new world, which the caller closes, or the ones
        that were made.

        Raises:
            ConfigError: as for :meth:`maporl.environments.build.TeamTools.from_config`.
        """
        return self.made.get("tools") or TeamTools.from_config(self.config, self.speakers, self.protocol.acts_in)


def each_algorithm(part: Callable[[ResolvedRun], Iterable[Fault]], run: ResolvedRun) -> Iterator[Fault]:
    """Yield what ``part`` finds in a run as the learners of each algorithm see it, each fault once, at the key that was
    written."""
    told: set[Fault] = set()
    for own in run.by_algorithm():
        for fault in (replace(found, key=own.key(found.key)) for found in part(own)):
            if fault not in told:
                told.add(fault)
                yield fault
