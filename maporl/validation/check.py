"""Check that the parts of a configuration fit each other, when it is read. Loads no model, and torch only for
advantages.

The parts check themselves: ``check(run)`` of a module yields faults. This module asks them in order, adds what is
nobody's own, and raises all errors as one.
"""

from collections.abc import Iterator
from pathlib import Path

from maporl.config.imports import unknown
from maporl.config.schema import Config
from maporl.errors import Fault, each, refuse
from maporl.rewards import check as rewards
from maporl.rollout import check as rollout
from maporl.run import ResolvedRun
from maporl.tasks import TASKS, build_task
from maporl.tasks.lessons import lessons_of
from maporl.team import check as team
from maporl.team import exchange
from maporl.training import check as training

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
