"""Tasks: questions with labels and a way to grade answers. ``TASKS`` names all; each is imported when asked for."""

from typing import Any

from maporl.config.imports import member
from maporl.tasks.base import Task as Task
from maporl.tasks.base import TaskError as TaskError
from maporl.tasks.registry import TASKS as TASKS
from maporl.tasks.registry import build_task as build_task


def __getattr__(name: str) -> Any:
    return member(TASKS, name, __name__)
