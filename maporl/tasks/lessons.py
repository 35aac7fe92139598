"""What a task teaches tiny models before PPO. Tasks of real data need none of it. Imports no torch."""

import random
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from maporl.tasks.base import Task
from maporl.types import Call, Example


class Lessons:
    """The texts that a task's oracle writes for a warm start: answers, replies in roles, calls, and single skills.

    A task that a warm start can use derives from this class besides :class:`maporl.Task`. One of your own need not:
    what it defines by these names is taken, and of all else the default (:func:`lessons_of`).
    """

    skills: tuple[str, ...] = ()
    """The skills that its questions ask for, where a student can learn one of them alone (:meth:`write_by_skill`)."""
    roles: ClassVar[frozenset[str]] = frozenset()
    """The roles for which :meth:`write_reply` writes something of their own. Warm starts teach it even where it
    does not answer the question and is asked for apart from a conversation."""

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """A right or a wrong answer, as a student would write it. Warm starts train on such answers.

        Raises:
            NotImplementedError: the task cannot write answers, and so cannot serve for a warm start.
        """
        raise NotImplementedError(f"task {type(self).__name__} cannot write example answers")

    def write_reply(self, example: Example, rng: random.Random, right: bool, role: str | None) -> str:
        """The right or wrong reply of a student in ``role``, where the protocol does not teach it (``Ask.taught``).

        By default it is an answer in every role, so that a student can repeat any reply that it is shown. A task
        overrides this where a planner is to learn plans and a solver answers. Roles come from the protocol, or from
        ``agents.NAME.role``.

        Raises:
            NotImplementedError: the task cannot write what is said in this role.
        """
        return self.write_answer(example, rng, right)

    def write_agreeing(self, example: Example, rng: random.Random, words: str, role: str | None) -> str:
        """The reply of a student in ``role`` that agrees with another agent's ``words``, right or wrong. By default
        it repeats them.

        A task overrides this where to agree is not to repeat: a program agrees with tests that it passes.
        """
        return words

    def write_calls(
        self, example: Example, tools: Collection[str], made: Sequence[Call] = ()
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        """The next calls that help to answer, as (name, arguments), of the named ``tools``. By default it teaches no
        calls.

        ``made`` has the calls that the student has made in this turn, with their results. A warm start teaches an agent
        with tools to make the calls before it answers rightly: one after the other, or at once (``limits.parallel``).
        """
        return ()

    def part(self, example: Example, asked: str, role: str | None) -> Example:
        """The part of ``example`` for which an agent is asked in the words ``asked``. By default it is all of it.

        A warm start teaches an agent that another agent calls to answer the part that it is asked for. It teaches the
        part in the task's own :attr:`roles` too.
        """
        return example

    def write_by_skill(self, example: Example, skill: str) -> str:
        """The answer of a student that knows only ``skill``, one of :attr:`skills`. Warm starts of specialists train on
        it.

        Raises:
            NotImplementedError: the task has no skills.
        """
        raise NotImplementedError(f"task {type(self).__name__} has no skills")


_NAMES = [name for name in vars(Lessons) if not name.startswith("_")]


def lessons_of(task: Task) -> Lessons:
    """Return what ``task`` teaches, whether it derives from :class:`Lessons` or only defines some of its names."""
    if isinstance(task, Lessons):
        return task
    lessons: Lessons = type(type(task).__name__, (Lessons,), {})()  # messages name the class of the task
    vars(lessons).update({name: getattr(task, name) for name in _NAMES if hasattr(task, name)})
    return lessons
