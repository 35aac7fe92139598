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
from maporl.backends.group import ENDED, GroupFailed
from maporl.backends.member import Member, MemberDied
from maporl.backends.spec import GroupSpec
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
        start: starts process number k.
        failures: the deadline, and how often processes are replaced.
        folder: the run's folder.
    """

    def __init__(self, spec: GroupSpec, start: Callable[[int], Member], failures: FailuresSection, folder: Path):
        self.spec, self.failures, self.folder = spec, failures, folder
        self._start = start
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[_Asked] = []
        self._free: list[Member] = []
        self._members: set[Member] = set()
        self._known: dict[str, tuple[int, Any]] = {}
        """The version and the handle of each policy's present weights."""
        self._background = ThreadPoolExecutor(spec.replicas, thread_name_prefix=f"engines of {spec.name}")
        self._failed: Exception | None = None
        self.started = 0
        self.replaced = 0
        self.calls: list[int] = []
        """The rows of each call since the last :meth:`take_counts`."""

    def build(self) -> None:
        """Start the processes, and load the models in them."""
        members = [self._begin() for _ in range(self.spec.replicas)]
        for member, loaded in members:
            loaded.result(timeout=self.failures.deadline)
            self._ready(member)

    def load(self, policy: str, version: int, weights: Any) -> None:
        """Give every process the ``version`` of a policy's weights, of which ``weights`` is a handle.

        Raises:
            WeightsDiffer: the weights do not fit, or are not those that were sent.
            GroupFailed: processes died too often.
        """
        with self._lock:
            self._known[policy] = (version, weights)
            members = list(self._members)
        for member, call in [(m, m.call("load", policy, version, weights)) for m in members]:
            try:
                call.result(timeout=self.failures.deadline)
            except (MemberDied, TimeoutError) as error:
                self._replace(member, error)

    def ask(self, rows: Sequence[TokenRow]) -> list[Future[Sampled]]:
        """Begin to sample a completion for each row, from the present weights. Return the completions to come.

        Raises:
            GroupFailed: the processes have ended, or died too often.
        """
        asked = [_Asked(row, Future()) for row in rows]
        with self._lock:
            if self._failed is not None:
                raise self._failed
            self._queue += asked
            self._dispatch()
        return [own.answer for own in asked]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of one process, and return its result.

        Raises:
            GroupFailed: the processes have ended, or died too often.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._members or self._failed is not None)
                if self._failed is not None:
                    raise self._failed
                member = next(iter(self._members))
            try:
                return member.call(method, *arguments).result(timeout=self.failures.deadline)
            except (MemberDied, TimeoutError) as error:
                self._replace(member, error)

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        with self._lock:
            calls = [member.call("release") for member in self._members]
        wait(calls, timeout=self.failures.deadline)

    def take_counts(self) -> dict[str, float]:
        """Return the mean number of rows of a call, and how many processes were replaced, since the last time."""
        with self._lock:
            calls, self.calls = self.calls, []
        return {"rows_per_call": sum(calls) / max(len(calls), 1), "replaced": float(self.replaced)}

    def end(self) -> None:
        """End the processes."""
        with self._lock:
            members, self._members, self._free = self._members, set(), []
            self._failed = self._failed or GroupFailed(ENDED.format(self.spec.name))
        for member in members:
            member.end()
        self._background.shutdown(wait=False)

    # -- one process --------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Member, Future[Any]]:
        with self._lock:
            number, self.started = self.started, self.started + 1
        member = self._start(number)
        return member, member.call("build")

    def _ready(self, member: Member) -> None:
        with self._lock:
            if self._failed is not None:
                member.end()
                return
            self._members.add(member)
            self._free.append(member)
            self._changed.notify_all()
            self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting rows to free processes, in equal parts. The lock is held."""
        while self._queue and self._free:
            size = math.ceil(len(self._queue) / len(self._free))
            size = size if self.spec.rows is None else min(size, self.spec.rows)
            part, self._queue = self._queue[:size], self._queue[size:]
            member = self._free.pop(0)
            versions = {own.row.policy: self._version(own.row.policy) for own in part}
            self.calls.append(len(part))
            call = member.call("sample", [own.row for own in part], versions)
            watch = threading.Timer(self.failures.deadline, self._hung, [member])
            watch.daemon = True
            watch.start()
            call.add_done_callback(lambda done, m=member, p=part, w=watch: self._done(done, m, p, w))  # type: ignore[misc]

    def _version(self, policy: str) -> int:
        return self._known[policy][0] if policy in self._known else 0

    def _done(self, call: Future[Any], member: Member, part: list[_Asked], watch: threading.Timer) -> None:
        watch.cancel()
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
            self._members.discard(member)
            self._free = [own for own in self._free if own is not member]
            self.replaced += 1
            too_often = self.replaced > self.failures.engine_replacements
            if not too_often:
                self._dispatch()
                logger.warning("%s is replaced: %s", member.name, error)
                self._background.submit(self._renew)
        member.end()
        if too_often:
            self._give_up(
                GroupFailed(
                    f"group {self.spec.name!r}: {error}; engines were replaced {self.replaced - 1} times "
                    "(cluster.failures.engine_replacements); resume from the newest checkpoint"
                )
            )

    def _renew(self) -> None:
        try:
            member, built = self._begin()
            built.result(timeout=self.failures.deadline)
            loaded: Mapping[str, int] = {}
            while True:
                with self._lock:
                    known = dict(self._known)
                    if all(loaded.get(name) == version for name, (version, _) in known.items()):
                        self._ready(member)  # nobody can load another version in between
                        return
                for name, (version, weights) in known.items():
                    if loaded.get(name) != version:
                        member.call("load", name, version, weights).result(timeout=self.failures.deadline)
                        loaded = {**loaded, name: version}
        except (MemberDied, TimeoutError) as error:
            with self._lock:
                self.replaced += 1
                again = self.replaced <= self.failures.engine_replacements
                if again and self._failed is None:
                    self._background.submit(self._renew)
            if not again:
                self._give_up(GroupFailed(f"group {self.spec.name!r}: {error}; its engines could not be replaced"))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            self._failed = error
            self._changed.notify_all()
            waiting, self._queue = self._queue, []
        for own in waiting:
            own.answer.set_exception(error)
