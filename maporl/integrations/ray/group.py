"""A group as the driver sees it: the processes that train its policies, and how they are started again.

Every call goes to all processes of the group, because they wait for each other. It has a deadline, and an error names
the process that has not answered, with the stacks of all of them in the run's folder.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from maporl.errors import RunError
from maporl.integrations.ray.member import GroupSpec, Member, MemberDied, NoPlace, write_stacks
from maporl.integrations.ray.scheduling import DEAD, IDLE, LEARNING, SAVING, SENDING, Activity, Clock, Turns, shown
from maporl.integrations.ray.section import FailuresSection
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.process.waits import finished

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
GRACE = 10.0
"""The seconds in which the death of a process may become known after another one has failed because of it."""
ENDED = (
    "group {!r}: its processes have ended with the run; to go on afterwards, train in a block 'with RayBackend() as "
    "backend:'"
)
"""What is said of a group that is asked after its end."""
SAVES = ("begin_saving", "saved", "finish_saving", "save_policy", "save_central")
"""The methods that write weights to the disk."""


class GroupFailed(RunError):
    """The processes of a group died or hung more often than the run allows."""


class Hung(MemberDied):
    """A process has not answered within the deadline."""


def resume_from(folder: Path) -> str:
    """Return what to do when a run in ``folder`` has ended with an error."""
    checkpoints = list_checkpoints(folder)
    return (
        f"resume from {checkpoints[-1]}"
        if checkpoints
        else f"{folder} has no checkpoint yet (training.save_steps); start again"
    )


class LearnerGroup:
    """The processes that train the policies of one group.

    Args:
        spec: the group.
        start: starts process number k.
        failures: the deadline, and how often the group is started again.
        folder: the run's folder.
        clock: returns the time in seconds.
        turns: who works on which device.
    """

    def __init__(
        self,
        spec: GroupSpec,
        start: Callable[[int], Member],
        failures: FailuresSection,
        folder: Path,
        clock: Clock = time.monotonic,
        turns: Turns | None = None,
    ):
        self.spec, self.failures, self.folder = spec, failures, folder
        self.turns = turns or Turns()
        self._start = start
        self.members: list[Member] = []
        self.restarts = 0
        self._activity = Activity(1, clock)  # its processes work together
        self._activity.start(self)
        self.bytes = 0
        """The bytes of all weights that are trained."""
        self._origin: list[tuple[str, Path]] = []
        """What was loaded before the first update: the methods, and their folders."""
        self._snapshots: list[Any] = []
        self._annotated: list[tuple] | None = None

    def build(self) -> None:
        """Start the processes, and build the learners in them."""
        self.members = []
        for rank in range(self.spec.devices):
            self.members.append(self._start(rank))
        with self._working():
            place = self._wait([self.members[0].call("meeting_place")])[0]
            self.bytes = self._wait([member.call("build", *place) for member in self.members])[0]

    def annotate(self, arguments: Sequence[tuple]) -> list[Any]:
        """Call :meth:`.learner_process.LearnerProcess.annotate` with each process's arguments."""
        annotations = self._safely(lambda: self._each("annotate", arguments), LEARNING)
        self._annotated = list(arguments)
        return annotations

    def update(self, arguments: Sequence[tuple]) -> Any:
        """Call :meth:`.learner_process.LearnerProcess.update`. Return what the first process returns."""

        def work() -> tuple[Any, list[Any]]:
            answer = self._each("update", arguments)[0]
            return answer, self._each("snapshot", kept=True) if self.failures.snapshots else []

        answer, self._snapshots = self._safely(work, LEARNING)
        self._annotated = None
        return answer

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process with the same arguments, and return what each returns."""
        what = SAVING if method in SAVES else IDLE
        return self._safely(lambda: self._each(method, [arguments] * len(self.members)), what)

    def kept(self, method: str, *arguments: Any) -> Any:
        """Call a method of every process, and return a handle of what the first one returns.

        A call of another process takes it as an argument.
        """
        return self._safely(lambda: self._each(method, [arguments] * len(self.members), kept=True), SENDING)[0]

    def take_counts(self) -> dict[str, float]:
        """Return what the processes did since the last time, and how often they were started again so far."""
        activity = shown(self._activity.take(), (LEARNING, SENDING, SAVING, DEAD))
        return {**{f"learner/{name}": value for name, value in activity.items()}, "restarts": float(self.restarts)}

    def load(self, folder: Path) -> None:
        """Load every policy from ``folder/NAME``. A group that is started again before the next update begins there."""
        self._origin, self._snapshots = [("load", folder)], []
        self.all("load", folder)

    def save_central(self, folder: Path) -> None:
        """Write the central critic of the group's policies into ``folder``, which exists."""
        self.all("save_central", folder)

    def load_central(self, folder: Path) -> None:
        """Read the central critic from ``folder``, after :meth:`load`."""
        self._origin.append(("load_central", folder))
        self.all("load_central", folder)

    def end(self) -> None:
        """End the processes."""
        for member in self.members:
            member.end()
        self.members = []

    # -- failures -----------------------------------------------------------------------------------------------------

    def _each(self, method: str, arguments: Sequence[tuple] | None = None, kept: bool = False) -> list[Any]:
        arguments = [()] * len(self.members) if arguments is None else arguments
        with self._working():
            calls = [
                member.call(method, *each, kept=kept) for member, each in zip(self.members, arguments, strict=True)
            ]
            return self._wait(calls, method)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Wait until the devices of the group are free, and hold them. The group ends with a process that dies."""
        if not self.members:
            raise GroupFailed(ENDED.format(self.spec.name))
        places = [member.place for member in self.members]
        with self._activity.doing(self, IDLE):
            self.turns.wait(places)
        try:
            yield
        except MemberDied:
            self.end()  # before others work there
            raise
        finally:
            self.turns.give(places)

    def _wait(self, calls: list[Future[Any]], method: str = "start") -> list[Any]:
        """Return the results of calls, one for each process or for the first ones, or raise MemberDied or Hung."""
        until = time.monotonic() + self.failures.deadline
        finished(calls, self.failures.deadline, FIRST_EXCEPTION)
        failed = [call.exception() for call in calls if call.done() and call.exception() is not None]
        if failed:
            # a process whose neighbour has died fails first, and the death is known a moment later
            finished(calls, min(GRACE, max(until - time.monotonic(), 0.0)))
            errors = [call.exception() for call in calls if call.done() and call.exception() is not None]
            raise next((error for error in errors if isinstance(error, MemberDied)), errors[0])  # type: ignore[misc]
        if not all(call.done() for call in calls):
            silent = [member.name for member, call in zip(self.members, calls, strict=False) if not call.done()]
            raise Hung(
                f"{', '.join(silent)}: no answer to {method!r} after {self.failures.deadline:g} s "
                f"(cluster.failures.deadline); stacks of all processes are in {self._write_stacks(method)}"
            )
        return [call.result() for call in calls]

    def _write_stacks(self, method: str) -> Path:
        text = "\n\n".join(f"{member.name}\n{member.stacks()}" for member in self.members)
        return write_stacks(self.folder, f"{self.spec.name}-{method}-{self.restarts}", text)

    def _safely(self, work: Callable[[], Result], what: str) -> Result:
        """Return what ``work`` returns. If a process dies, the group is built again and the work repeated."""
        while True:
            try:
                with self._activity.doing(self, what):
                    return work()
            except MemberDied as error:
                with self._activity.doing(self, DEAD):
                    self._rebuild(error)

    def _rebuild(self, error: MemberDied) -> None:
        while True:
            self.restarts += 1
            if self.restarts > self.failures.group_restarts or not self.failures.snapshots:
                self.end()
                raise GroupFailed(
                    f"group {self.spec.name!r}: it was started again {self.restarts - 1} times "
                    f"(cluster.failures.group_restarts); {resume_from(self.folder)}. The last error: {error}"
                ) from error
            logger.warning("group %r is started again: %s", self.spec.name, error)
            self.end()
            try:
                self.build()
                if self._snapshots:
                    self._each("restore", [tuple(self._snapshots)] * len(self.members))
                else:
                    for method, folder in self._origin:
                        self._each(method, [(folder,)] * len(self.members))
                if self._annotated is not None:
                    self._each("annotate", self._annotated)
                return
            except MemberDied as again:
                error = again
            except NoPlace as nowhere:
                self.end()
                raise GroupFailed(f"group {self.spec.name!r}: {nowhere}; {resume_from(self.folder)}") from nowhere
