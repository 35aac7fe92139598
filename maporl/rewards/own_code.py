"""Check, before a model loads, that a task of the user's own keeps its contract. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from maporl.config.imports import is_import, look_up, told
from maporl.config.schema import Config
from maporl.errors import ConfigError, Fault, UserError
from maporl.rewards.base import check_environments
from maporl.rewards.build import is_completion_reward
from maporl.run import ResolvedRun
from maporl.tasks import Task
from maporl.types import Example, Grade

LOOKED_AT = 1_000
"""The examples of a split that are looked at."""
GRADED = 4
"""The examples of a split whose right answers are graded. Grading may be slow."""


def own_task_warnings(run: ResolvedRun) -> Iterator[Fault]:
    """Yield a warning for each split of a task of the user's own (``MODULE:OBJECT``) whose right answers it calls
    wrong.

    Raises:
        ConfigError: it gives something else, repeats an id, or raises an error.
    """
    if is_import(run.config.task["name"]):
        for task in run.splits:
            yield from _split_warnings(run.config, task)


def check_reward_functions(run: ResolvedRun) -> None:
    """Check that the task has a column for every parameter of reward functions with the signature of TRL's trainers.

    Raises:
        ConfigError: a parameter has no column and no default, or a column has a name that is taken.
    """
    config = run.config
    named: list[Any] = [look_up(name, {}, "reward.sources") for name in config.reward.asked if is_import(name)]
    functions = [function for function in named if is_completion_reward(function)]
    if not functions:
        return
    from maporl.rewards.functions import check_columns, takes_environments  # needs torch

    readers = [function.__name__ for function in functions if takes_environments(function)]
    check_environments(readers, {name: section.isolate == "process" for name, section in config.environments.items()})

    for task in run.splits:
        try:
            check_columns(functions, task, f"task {config.task['name']}")
        except ValueError as error:
            raise ConfigError(f"reward.sources: {error}") from None


def _split_warnings(config: Config, task: Task) -> Iterator[Fault]:
    """Check the first examples of a split, and grade the right answers of a few. Yield the first that it calls
    wrong."""
    where = f"task {config.task['name']}"
    seen: dict[str, int] = {}
    examples: list[Example] = []
    for index in range(min(LOOKED_AT, len(task))):
        with _own_code(config, f"{where}: example {index}"):
            example = task[index]
        _must_be_example(example, f"{where}: __getitem__({index})")
        if example.id in seen:
            raise ConfigError(f"{where}: examples {seen[example.id]} and {index} have the same id {example.id!r:.60}")
        seen[example.id] = index
        with _own_code(config, f"{where}: question of example {index}"):
            question = task.question(example)
        if not isinstance(question, str):
            raise ConfigError(f"{where}: question returned {_kind(question)} for example {index}; expected a text")
        examples.append(example)
    graded = islice(examples, GRADED if task.labelled and task.has_questions else 0)
    yield from islice((warning for example in graded for warning in _grade(config, task, example, where)), 1)


def _must_be_example(example: object, where: str) -> None:
    wanted = "maporl.Example(id, question, answer), whose fields are texts"
    if not isinstance(example, Example):
        raise ConfigError(f"{where} returned {_kind(example)}; expected {wanted}")
    for name, value in (("id", example.id), ("question", example.question), ("answer", example.answer)):
        if not isinstance(value, str):
            raise ConfigError(f"{where} returned an Example whose {name} is {_kind(value)}; expected {wanted}")


def _grade(config: Config, task: Task, example: Example, where: str) -> Iterator[Fault]:
    """Grade the solution and the bare label of an example. Yield a warning if its right answer is called wrong."""
    verdicts = []
    with _own_code(config, f"{where}: solution"):
        solution = task.solution(example)
    for text in (solution, example.answer):
        with _own_code(config, f"{where}: grade"):
            grade = task.grade(example, text)
        if not isinstance(grade, Grade) or not (grade.correct is None or isinstance(grade.correct, bool)):
            got = f"a Grade whose correct is {_kind(grade.correct)}" if isinstance(grade, Grade) else _kind(grade)
            raise ConfigError(
                f"{where}: grade returned {got}; expected maporl.Grade(answer, correct, reason), where answer is a "
                "text or None, correct is True, False or None, and reason is a text"
            )
        verdicts.append(grade.correct)
    own_solution = type(task).solution is not Task.solution
    if verdicts[0] is False and (own_solution or verdicts[1] is False):
        what = f"it grades its own right answer {solution!r:.60} to question {example.id} as wrong"
        yield Fault(where, what, "change grade or solution", "warning")


@contextmanager
def _own_code(config: Config, where: str) -> Iterator[None]:
    """Turn an error of the user's code into one line with its file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {told(error, [Path(folder) for folder in config.pythonpath])}") from None


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
