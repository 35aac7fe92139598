"""The runs that take part, whether their agents can play together, and the questions that none was trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from maporl.config.call_options import CallLimits
from maporl.config.schema import Config
from maporl.errors import ConfigError, RunError
from maporl.report.charts import unique_names
from maporl.run import ResolvedRun
from maporl.storage.run_folder import INITIAL
from maporl.tasks import Task, build_task
from maporl.team.saved import check_complete, read_team
from maporl.validation.load import check
from trl_ext.files.paths import below

ALIKE = (
    "restate", "ppo.response_length", "ppo.stop_token", "ppo.stop_token_id", "ppo.stop_strings", "evaluation.questions",
    "evaluation.temperature", "evaluation.top_p", "evaluation.top_k", "evaluation.sampling", "tools", "environments",
    "agents.AGENT.tools", "agents.AGENT.limits", "agents.AGENT.sampling",
)  # fmt: skip
"""The options that decide how an evaluation is played, by their dotted keys. They must be the same in every run."""
_UNSET = {"limits": CallLimits()}
"""What an agent's option that is not set stands for."""


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
    weights_differ = first.weights and (first.trainable or first.tiny is not None)
    return weights_differ or any(section != first for section in sections)


def _check_frozen(entrant: Entrant) -> None:
    """Check that the weights of frozen tiny models, which are built at random, were saved when the run started."""
    for name, section in entrant.config.agents.items():
        initial = below(entrant.folder / INITIAL, section.policy or name)
        if section.tiny is not None and not section.trainable and not initial.is_dir():
            raise RunError(
                f"{entrant.folder}: agents.{name} is a frozen tiny model, and {initial} with its weights is missing; "
                "only runs with a warm start keep them"
            )


def _check_alike(first: Entrant, other: Entrant) -> None:
    """Check that ``other`` plays the same questions in the same way as ``first``, with agents of the same names."""
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
    for key in ALIKE:
        if (mine := _value(one, key)) != (theirs := _value(two, key)):
            raise _differ_in(key, mine, theirs, differ)
    if not one.evaluation.questions:
        raise ConfigError("evaluation.questions is 0; give evaluation.questions=NUMBER after the runs")
    if (protocol.between_turns() or protocol.score_between_turns) and one.reward != two.reward:
        raise ConfigError(
            f"{other.name}: its reward section is not that of {first.name}, and protocol {protocol.label} shows agents "
            "their scores or decides by them; give runs with the same rewards"
        )


def _value(config: Config, key: str) -> Any:
    """Return the option at a dotted ``key`` of :data:`ALIKE`; for a key with AGENT, that of each agent by name."""
    section, _, option = key.partition(".AGENT.")
    value = attrgetter(section)(config)
    if not option:
        return value
    each = {name: getattr(agent, option) for name, agent in value.items()}
    return {name: _UNSET.get(option) if one is None else one for name, one in each.items()}


def _differ_in(key: str, mine: Any, theirs: Any, differ: Callable[..., ConfigError]) -> ConfigError:
    """Return the error for runs that differ in the option ``key``, or in some of its named options."""
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
            f"all {len(held_out)} held-out questions of {entrants[0].name} were training questions of another run, "
            "because each run's seed draws its own split; train the runs with the same task.seed"
        )
    return held_out, asked[: first.evaluation.questions], len(held_out) - len(asked)
