"""A process of a group as the driver sees it, whatever has started it. Imports no torch and no Ray."""

from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, Protocol

from maporl.errors import RunError


class MemberDied(RunError):
    """A process of a group has ended, or cannot be reached."""


class NoPlace(RunError):
    """The place of a process is lost, and no machine has another one."""


class Member(Protocol):
    """A process that answers calls one after the other."""

    name: str
    """What errors and logs call it, such as ``ann learner 0``."""

    @property
    def place(self) -> Hashable:
        """Its device. Processes of the same place share it, and work one at a time."""
        ...

    def call(self, method: str, *arguments: Any, kept: bool = False) -> Future[Any]:
        """Begin a call of a method, and return its result to come, or if it is ``kept`` elsewhere a handle of it.

        The future raises :class:`MemberDied` if the process ends before it has answered, and otherwise what the method
        raises.
        """
        ...

    def answers(self, seconds: float) -> bool:
        """Return whether the process says within ``seconds`` that it is there, although it may be busy with a call."""
        ...

    def stacks(self) -> str:
        """Return what every thread of the process is doing, although it may be busy with a call."""
        ...

    def end(self) -> None:
        """End the process at once."""
        ...
