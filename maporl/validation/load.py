"""Read and check a configuration before anything heavy is loaded. Imports no torch unless a check needs it.

The parts check themselves: ``check(run)`` of a module yields faults. :func:`check` asks them in order, adds what is
nobody's own, and raises all errors as one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_values
from maporl.config.imports import unknown, with_imports
from maporl.engines.choice import choose_engines
from maporl.errors import Fault, each, refuse
from maporl.rewards import check as rewards
from maporl.rollout import check as rollout
from maporl.run import ResolvedRun
from maporl.tasks import TASKS, build_task
from maporl.tasks.lessons import lessons_of
from maporl.team import check as team
from maporl.team import exchange
from maporl.training import check as training
from trl_ext.errors import short_trace


@short_trace
def load(path: str | Path, overrides: list[str] | None = None, trains: bool = True) -> Config:
    """Read and check the configuration in ``path``.

    ``path`` may be the name of a recipe (``maporl recipes list``) or ``quickstart``. ``overrides`` are ``a.b=c`` with
    YAML values. Three keys of a file are not options: ``extends`` names another file, or a recipe, whose values this
    one overrides, ``agent_defaults`` is merged into every agent, and ``recipe`` says where a method comes from. Modules
    of the user's own that the configuration names are imported (:mod:`maporl.config.imports`). They are looked for in
    the file's folder. Agents whose engine is not named may get vLLM (:mod:`maporl.engines.choice`).

    Raises:
        ConfigError: the file cannot be read, or the configuration cannot run.
    """
    return from_dict(read_values(path, overrides), str(path), trains)


@short_trace
def from_dict(values: dict[str, Any], where: str = "configuration", trains: bool = True) -> Config:
    """Build and check a configuration from plain values (see :func:`load`).

    Messages begin with ``where``. ``trains`` says whether it is to be trained, so that somebody must learn.

    Raises:
        ConfigError: the configuration cannot run.
    """
    config = choose_engines(with_imports(parse_config(values, where), where), values)
    check(config, where, trains)
    return config


PARTS = (
    team.check,
    team.check_sampling,
    exchange.somebody_learns,
    exchange.check,
    rewards.check,
    rollout.check,
    training.check,
)
"""What checks itself when a configuration is read, in this order."""


def check(config: Config, where: str, trains: bool = True) -> None:
    """Check that the parts of ``config`` fit each other. This loads no model, and torch only for advantages.

    ``trains`` says whether it is to be trained. A team behind an API, which learns nothing, can be played and recorded.

    Raises:
        ConfigError: they do not. The message begins with ``where`` and names the first fault, and its notes the others.
    """
    run = ResolvedRun(config, where)
    refuse(_named(run), where)  # alone: that parts have no name is why the others would not find them
    parts = [part for part in PARTS if trains or part is not exchange.somebody_learns]
    refuse(each((_output, training.check_options, *parts, _task), run), where)


def _named(run: ResolvedRun) -> Iterator[Fault]:
    """Yield the parts of a run that have no name with which they can be built here."""
    if run.config.only_in_python:
        parts = ", ".join(f"{key} ({what})" for key, what in run.config.only_in_python.items())
        what = f"the run was made in Python with parts that cannot be built from here: {parts:.400}"
        remedy = "define them in a module that can be imported, or pass them to a trainer of Team.from_pretrained(RUN)"
        yield Fault("only_in_python", what, remedy)


def _output(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why the output folder can be none."""
    name = run.config.output_dir
    folder = Path(name)
    try:
        there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    except OSError as error:  # such as a name that is too long
        yield Fault("output_dir", f"cannot be used ({error.strerror}), got {name!r:.80}", "give another name")
        return
    if there.exists() and not there.is_dir():
        what = f"{str(there)!r} is a file; expected a new or empty folder"
        yield Fault("output_dir", what, "so give another name")


def _task(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what the task lacks for the protocol and the warm start."""
    config, protocol = run.config, run.protocol
    name = config.task.get("name")
    task = build_task(config.task, "train", config.seed, run.where)
    if not task.has_questions and not protocol.own_questions:
        with_questions = ", ".join(name for name, kind in TASKS.installed().items() if kind.has_questions)
        what = f"{name!r} has no questions, and protocol {config.protocol['name']!r} brings none"
        yield Fault("task", what, f"use protocol: {{name: game}}, or a task with questions: {with_questions}")
    _ = run.curriculum
    for agent, pupil in config.warm_start.agents.items():
        if agent not in config.agents:
            yield Fault("warm_start.agents", unknown(agent, config.agents))
        skills = lessons_of(task).skills
        if pupil.skill is not None and pupil.skill not in skills:
            what = unknown(pupil.skill, skills) if skills else f"task {name!r} has no skills; remove it"
            yield Fault(f"warm_start.agents.{agent}.skill", what)
