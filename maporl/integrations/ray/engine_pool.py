"""The processes that sample from the policies of a group, as the driver sees them.

Answers that are asked for wait in the driver until a process is free, which then takes as many as it can. So batches
are as large as they can be without anybody waiting for them. A process with vLLM is free again after a moment: it takes
new rows while it works on others, and its answers come one by one. A process that dies is replaced, and what it was
asked is asked again. What is drawn depends on the answer's place in its dialogue alone, so the second answer is the
first one.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from maporl.integrations.ray.engine_process import OtherVersion
from maporl.integrations.ray.group import ENDED, GroupFailed, resume_from
from maporl.integrations.ray.member import GroupSpec, Member, MemberDied, NoPlace, write_stacks
from maporl.integrations.ray.scheduling import DEAD, SAMPLING, SENDING, Activity, Clock, Queued, RowQueue, Turns, shown
from maporl.integrations.ray.section import FailuresSection
from trl_ext.process.waits import Threads, finished, result, until
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

logger = logging.getLogger(__name__)


@dataclass
class _Counts:
    """Counts since the last record: the rows of each call, sampled tokens, the longest queue, and sent bytes."""

    calls: list[int] = field(default_factory=list)
    tokens: int = 0
    waiting: int = 0
    sent: int = 0


class EnginePool:
    """Gives rows to the processes that sample from one group's policies.

    Args:
        spec: the group.
        start: starts process number k in the place of number n of ``spec.replicas``.
        failures: the deadline, and how often processes are replaced.
        folder: the run's folder.
        clock: returns the time in seconds.
        turns: who works on which device.
    """

    def __init__(
        self,
        spec: GroupSpec,
        start: Callable[[int, int], Member],
        failures: FailuresSection,
        folder: Path,
        clock: Clock = time.monotonic,
        turns: Turns | None = None,
    ):
        self.spec, self.failures, self.folder = spec, failures, folder
        self._start = start
        self.turns = turns or Turns()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._rows: RowQueue[Member] = RowQueue(spec.rows, joining=bool(spec.vllm))
        self._begun: list[Member] = []
        self._members: dict[Member, int] = {}
        """Those of them that have loaded their models, with the number of each one's place."""
        self._missing = 0
        """The number of processes whose place is lost."""
        self._stacks: dict[Member, Path] = {}
        """What was written of processes that did not answer in time."""
        self._latest: dict[str, tuple[int, Any]] = {}
        """The version and the handle of each policy's present weights."""
        self._background = Threads(spec.replicas, f"engines of {spec.name}", for_all=True)
        self._failed: Exception | None = None
        self.started = 0
        self.replaced = 0
        self._counts = _Counts()
        self._activity = Activity(spec.replicas, clock)

    def build(self) -> None:
        """Start the processes, and load the models in them.

        Raises:
            ConfigError: a model cannot be loaded.
            MemberDied: a process died.
            GroupFailed: one has not loaded its models within the deadline.
        """
        begun = [(*self._begin(place), place) for place in range(self.spec.replicas)]
        for member, loaded, place in begun:
            try:
                result(loaded)
            except MemberDied:
                if member not in self._stacks:
                    raise
                raise GroupFailed(
                    f"{member.name}: no model is loaded after {self.failures.deadline:g} s "
                    f"(cluster.failures.deadline); its stacks are in {self._stacks[member]}"
                ) from None
            self._ready(member, place)

    def members(self) -> list[Member]:
        """Return the processes that were started and have not ended."""
        with self._lock:
            return list(self._begun)

    def load(self, policy: str, version: int, weights: Any) -> None:
        """Give every process the ``version`` of a policy's weights, of which ``weights`` is a handle.

        Calls that a process has begun end with the weights that they were asked for. It then loads, and this does not
        wait for it. If weights do not fit, :meth:`ask` raises it.
        """
        with self._lock:  # nothing is asked of a version before the process is told to load it
            self._latest[policy] = (version, weights)
            for member in list(self._members):
                self._send(member, policy, version, weights).add_done_callback(partial(self._loaded, member))

    def _loaded(self, member: Member, call: Future[Any]) -> None:
        error = call.exception()
        if isinstance(error, MemberDied):
            self._replace(member, error)
        elif isinstance(error, Exception):
            self._give_up(error)

    def ask(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled]]:
        """Begin to sample a completion for each request, from the present weights. Return the completions to come.

        Each has the number of updates that its weights had had, which is 0 for a policy that is not trained.

        Raises:
            WeightsDiffer: the weights that were sent do not fit, or are not those that arrived.
            GroupFailed: processes died too often.
        """
        queued = [Queued(request, Future()) for request in requests]
        with self._lock:
            if self._failed is not None:
                raise self._failed
            self._rows.waiting += queued
            self._dispatch()
        return [each.answer for each in queued]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of one process, and return its result.

        Raises:
            GroupFailed: the processes have ended, or died too often.
        """
        while True:
            with self._changed:
                until(partial(self._changed.wait_for, lambda: self._members or self._failed is not None))
                if self._failed is not None:
                    raise self._failed
                member = next(iter(self._members))
            try:
                return result(self._call(member, method, *arguments))
            except MemberDied as error:
                self._replace(member, error)

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        with self._lock:
            members = list(self._members)
        finished([self._call(member, "release") for member in members])

    def take_counts(self) -> dict[str, float]:
        """Return what the processes did and what was counted since the last time, and how many were replaced so far."""
        with self._lock:
            counts, self._counts = self._counts, _Counts()
            spent = self._activity.take()
        sampled = spent.get(SAMPLING, 0.0) * self.spec.replicas
        activity = shown(spent, (SAMPLING, SENDING, DEAD))
        return {
            "seconds": sum(spent.values()),
            **{f"engines/{name}": value for name, value in activity.items()},
            "rows_per_call": sum(counts.calls) / max(len(counts.calls), 1),
            "tokens_per_second": counts.tokens / sampled if sampled else 0.0,
            "waiting": float(counts.waiting),
            "sent_bytes": float(counts.sent),
            "replaced": float(self.replaced),
        }

    def end(self) -> None:
        """End the processes."""
        with self._lock:
            members, self._begun, self._members = self._begun, [], {}
            self._give_up(self._failed or GroupFailed(ENDED.format(self.spec.name)))
        for member in members:
            member.end()
        self._background.close()

    # -- one process --------------------------------------------------------------------------------------------------

    def _begin(self, place: int) -> tuple[Member, Future[Any]]:
        with self._lock:
            number, self.started = self.started, self.started + 1
        member = self._start(number, place)
        with self._lock:
            self._begun.append(member)
        return member, self._call(member, "build")

    def _call(self, member: Member, method: str, *arguments: Any, what: str | None = None) -> Future[Any]:
        """Begin a call of the kind ``what`` when the device is free. A process that answers too late is ended."""

        def begin() -> Future[Any]:
            watch = threading.Timer(self.failures.deadline, self._hung, [member])
            watch.daemon = True
            watch.start()
            if what is not None:
                self._activity.begin(member, what)
            call = member.call(method, *arguments)
            call.add_done_callback(lambda _: ended(watch))
            return call

        def ended(watch: threading.Timer) -> None:
            watch.cancel()
            if what is not None:
                self._activity.end(member, what)

        return self.turns.run([member.place], begin)

    def _finish(self, member: Member) -> None:
        with self._lock:
            if member not in self._begun:  # end() has ended it
                return
            self._begun.remove(member)
        member.end()

    def _ready(self, member: Member, place: int) -> None:
        with self._lock:
            if self._failed is not None:
                self._finish(member)
                return
            self._members[member] = place
            self._activity.start(member)
            self._rows.add(member)
            self._changed.notify_all()
            self._dispatch()

    def _send(self, member: Member, policy: str, version: int, weights: Any) -> Future[None]:
        """Begin to give ``member`` the ``version`` of a policy's weights, and count them when they have arrived."""
        sent: Future[None] = Future()

        def arrived(call: Future[int]) -> None:
            if (error := call.exception()) is not None:
                sent.set_exception(error)
                return
            with self._lock:
                self._counts.sent += call.result()
            sent.set_result(None)

        self._call(member, "load", policy, version, weights, what=SENDING).add_done_callback(arrived)
        return sent

    def _dispatch(self) -> None:
        """Give waiting rows to free processes. The lock is held."""
        if self._failed is not None:
            waiting, self._rows.waiting = self._rows.waiting, []
            for queued in waiting:
                queued.answer.set_exception(self._failed)
            return
        while (work := self._rows.next()) is not None:
            member, new, running = work
            self._count_waiting()
            versions = {q.request.policy: self._version(q.request.policy) for q in new.values()}
            for queued in new.values():
                queued.version = versions[queued.request.policy]
            self._counts.calls.append(running)
            rows = {number: queued.request for number, queued in new.items()}
            call = self._call(member, "sample", rows, versions, what=SAMPLING)
            call.add_done_callback(partial(self._done, member))
        self._count_waiting()

    def _count_waiting(self) -> None:
        if self._rows.all_busy:
            self._counts.waiting = max(self._counts.waiting, len(self._rows.waiting))

    def _version(self, policy: str) -> int:
        return self._latest[policy][0] if policy in self._latest else 0

    def _done(self, member: Member, call: Future[dict[int, Sampled]]) -> None:
        error = call.exception()
        if isinstance(error, MemberDied | OtherVersion) and self._failed is None:
            self._replace(member, error)
            return
        with self._lock:
            if error is None:
                answered = self._rows.answered(member, call.result())
                self._counts.tokens += sum(len(sampled.ids) for _, sampled in answered)
            else:
                failed = self._rows.given_up(member)
            self._rows.free(member)
            self._dispatch()
        if error is None:
            for queued, sampled in answered:
                queued.answer.set_result(replace(sampled, version=queued.version))
        else:
            for queued in failed:
                queued.answer.set_exception(self._failed or error)

    def _hung(self, member: Member) -> None:
        if member not in self._begun:  # it has ended, and Ray perhaps with it
            return
        file = self._stacks[member] = write_stacks(self.folder, member.name, member.stacks())
        logger.warning("%s: no answer after %g s; its stacks are in %s", member.name, self.failures.deadline, file)
        member.end()

    def _replace(self, member: Member, error: Exception) -> None:
        """Put a new process in the place of ``member``, in the background."""
        with self._lock:
            if member not in self._members:
                self._dispatch()
                return
            place = self._members.pop(member)
            self._rows.remove(member)
            self._activity.gone(member)
            self.replaced += 1
            too_often = self.replaced > self.failures.engine_replacements
            if not too_often:
                self._dispatch()
                logger.warning("%s is replaced: %s", member.name, error)
                self._background.submit(self._renew, place)
        self._finish(member)
        if too_often:
            self._give_up(
                GroupFailed(
                    f"group {self.spec.name!r}: its engines were replaced {self.replaced - 1} times "
                    f"(cluster.failures.engine_replacements); {resume_from(self.folder)}. The last error: {error}"
                )
            )

    def _renew(self, place: int) -> None:
        try:
            member, built = self._begin(place)
        except NoPlace as error:
            self._do_without(error)
            return
        except Exception as error:
            self._give_up(error)
            return
        try:
            result(built)
            loaded: Mapping[str, int] = {}
            while True:
                with self._lock:
                    latest = dict(self._latest)
                    if all(loaded.get(name) == version for name, (version, _) in latest.items()):
                        self._ready(member, place)  # nobody can load another version in between
                        return
                for name, (version, weights) in latest.items():
                    if loaded.get(name) != version:
                        result(self._send(member, name, version, weights))
                        loaded = {**loaded, name: version}
        except MemberDied as error:
            self._finish(member)
            with self._lock:
                self.replaced += 1
                again = self.replaced <= self.failures.engine_replacements
                if again and self._failed is None:
                    self._background.submit(self._renew, place)
            if not again:
                self._give_up(GroupFailed(f"group {self.spec.name!r}: its engines could not be replaced: {error}"))
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
            self._changed.notify_all()
            self._dispatch()
