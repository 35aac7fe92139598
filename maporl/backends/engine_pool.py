"""The processes that sample from the policies of a group, as the driver sees them.

Answers that are asked for wait in the driver until a process is free, which then takes as many as it can. So batches are as
large as they can be without anybody waiting for them. A process that dies is replaced, and what it was asked is asked
again. What is drawn depends on the answer's place in its dialogue alone, so the second answer is the first one.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maporl.backends.engine_process import OtherVersion
from maporl.backends.group import GroupFailed, resume_from
from maporl.backends.member import Member, MemberDied, NoPlace
from maporl.backends.spec import GroupSpec
from maporl.backends.turns import Turns
from maporl.config.cluster import FailuresSection
from maporl.engines.token_sampler import TokenRow
from trl_ext.sampling_options import Sampled

logger = logging.getLogger(__name__)


@dataclass
class _Asked:
    row: TokenRow
    answer: Future[Sampled]


class EnginePool:
    """Gives rows to the processes that sample from one group's policies.

    Args:
        spec: the group.
        start: starts process number k in the place of number n of ``spec.replicas``.
        failures: the deadline, and how often processes are replaced.
        folder: the run's folder.
        turns: who works on which device.
    """

    def __init__(
        self,
        spec: GroupSpec,
        start: Callable[[int, int], Member],
        failures: FailuresSection,
        folder: Path,
        turns: Turns | None = None,
    ):
        self.spec, self.failures, self.folder = spec, failures, folder
        self.turns = turns or Turns()
        self._start = start
        self._lock = threading.RLock()
        self._queue: list[_Asked] = []
        self._free: list[Member] = []
        self._members: dict[Member, int] = {}
        """The processes, with the number of each one's place."""
        self._known: dict[str, tuple[int, Any]] = {}
        """The version and the handle of each policy's present weights."""
        self._background = ThreadPoolExecutor(spec.replicas, thread_name_prefix=f"engines of {spec.name}")
        self._failed: Exception | None = None
        self._missing = 0
        """The number of processes whose place is lost."""
        self.started = 0
        self.replaced = 0
        self.calls: list[int] = []
        """The rows of each call since the last :meth:`take_counts`."""

    def build(self) -> None:
        """Start the processes, and load the models in them."""
        begun = [(*self._begin(place), place) for place in range(self.spec.replicas)]
        for member, loaded, place in begun:
            loaded.result()
            self._ready(member, place)

    def load(self, policy: str, version: int, weights: Any) -> None:
        """Give every process the ``version`` of a policy's weights, of which ``weights`` is a handle.

        Raises:
            WeightsDiffer: the weights do not fit, or are not those that were sent.
            GroupFailed: processes died too often.
        """
        with self._lock:
            self._known[policy] = (version, weights)
            members = list(self._members)
        for member, call in [(m, self._call(m, "load", policy, version, weights)) for m in members]:
            try:
                call.result()
            except MemberDied as error:
                self._replace(member, error)

    def ask(self, rows: Sequence[TokenRow]) -> list[Future[Sampled]]:
        """Begin to sample a completion for each row, from the present weights. Return the completions to come."""
        asked = [_Asked(row, Future()) for row in rows]
        with self._lock:
            self._queue += asked
            self._dispatch()
        return [own.answer for own in asked]

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        with self._lock:
            members = list(self._members)
        wait([self._call(member, "release") for member in members])

    def take_counts(self) -> dict[str, float]:
        """Return the mean number of rows of a call, and how many processes were replaced, since the last time."""
        with self._lock:
            calls, self.calls = self.calls, []
        return {"rows_per_call": sum(calls) / max(len(calls), 1), "replaced": float(self.replaced)}

    def end(self) -> None:
        """End the processes."""
        with self._lock:
            members, self._members, self._free = list(self._members), {}, []
            self._failed = self._failed or GroupFailed(f"group {self.spec.name!r}: its engines have ended")
        for member in members:
            member.end()
        self._background.shutdown(wait=False)

    # -- one process --------------------------------------------------------------------------------------------------

    def _begin(self, place: int) -> tuple[Member, Future[Any]]:
        with self._lock:
            number, self.started = self.started, self.started + 1
        member = self._start(number, place)
        return member, self._call(member, "build")

    def _call(self, member: Member, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call when the process's device is free. A process that does not answer in time is ended."""

        def begin() -> Future[Any]:
            watch = threading.Timer(self.failures.deadline, self._hung, [member])
            watch.daemon = True
            watch.start()
            call = member.call(method, *arguments)
            call.add_done_callback(lambda _: watch.cancel())
            return call

        return self.turns.run([member.place], begin)

    def _ready(self, member: Member, place: int) -> None:
        with self._lock:
            if self._failed is not None:
                member.end()
                return
            self._members[member] = place
            self._free.append(member)
            self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting rows to free processes, in equal parts. The lock is held."""
        if self._failed is not None:
            waiting, self._queue = self._queue, []
            for own in waiting:
                own.answer.set_exception(self._failed)
        while self._queue and self._free:
            size = math.ceil(len(self._queue) / len(self._free))
            size = size if self.spec.rows is None else min(size, self.spec.rows)
            part, self._queue = self._queue[:size], self._queue[size:]
            member = self._free.pop(0)
            versions = {own.row.policy: self._version(own.row.policy) for own in part}
            self.calls.append(len(part))
            call = self._call(member, "sample", [own.row for own in part], versions)
            call.add_done_callback(lambda done, m=member, p=part: self._done(done, m, p))  # type: ignore[misc]

    def _version(self, policy: str) -> int:
        return self._known[policy][0] if policy in self._known else 0

    def _done(self, call: Future[Any], member: Member, part: list[_Asked]) -> None:
        error = call.exception()
        if error is None:
            self._free_again(member)
            for own, found in zip(part, call.result(), strict=True):
                own.answer.set_result(found)
        elif isinstance(error, MemberDied | OtherVersion):
            with self._lock:
                self._queue[:0] = part
            self._replace(member, error)
        else:
            self._free_again(member)
            for own in part:
                own.answer.set_exception(error)

    def _free_again(self, member: Member) -> None:
        with self._lock:
            if member in self._members:
                self._free.append(member)
                self._dispatch()

    def _hung(self, member: Member) -> None:
        file = self.folder / "stacks" / f"{member.name.replace(' ', '-')}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(member.stacks())
        logger.warning("%s: no answer after %g s; its stacks are in %s", member.name, self.failures.deadline, file)
        member.end()

    def _replace(self, member: Member, error: Exception) -> None:
        """Put a new process in the place of ``member``, in the background."""
        with self._lock:
            if member not in self._members:
                self._dispatch()
                return
            place = self._members.pop(member)
            self._free = [own for own in self._free if own is not member]
            self.replaced += 1
            too_often = self.replaced > self.failures.engine_replacements
            if not too_often:
                self._dispatch()
                logger.warning("%s is replaced: %s", member.name, error)
                self._background.submit(self._renew, place)
        member.end()
        if too_often:
            self._give_up(
                GroupFailed(
                    f"group {self.spec.name!r}: {error}; engines were replaced {self.replaced - 1} times "
                    f"(cluster.failures.engine_replacements); {resume_from(self.folder)}"
                )
            )

    def _renew(self, place: int) -> None:
        try:
            member, built = self._begin(place)
            built.result()
            loaded: Mapping[str, int] = {}
            while True:
                with self._lock:
                    known = dict(self._known)
                    if all(loaded.get(name) == version for name, (version, _) in known.items()):
                        self._ready(member, place)  # nobody can load another version in between
                        return
                for name, (version, weights) in known.items():
                    if loaded.get(name) != version:
                        self._call(member, "load", name, version, weights).result()
                        loaded = {**loaded, name: version}
        except NoPlace as error:
            self._do_without(error)
        except MemberDied as error:
            with self._lock:
                self.replaced += 1
                again = self.replaced <= self.failures.engine_replacements
                if again and self._failed is None:
                    self._background.submit(self._renew, place)
            if not again:
                self._give_up(GroupFailed(f"group {self.spec.name!r}: {error}; its engines could not be replaced"))
        except Exception as error:
            self._give_up(error)

    def _do_without(self, error: NoPlace) -> None:
        """Go on with the processes that are left, if there are any."""
        with self._lock:
            self._missing += 1
            left = self.spec.replicas - self._missing
        if left:
            logger.warning(
                "group %r: %s; it goes on with %d engines of %d", self.spec.name, error, left, self.spec.replicas
            )
        else:
            self._give_up(GroupFailed(f"group {self.spec.name!r}: {error}; {resume_from(self.folder)}"))

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            self._failed = error
            self._dispatch()
