"""Several sandboxes, so that programs run on all cores."""

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from maporl.sandbox.outcomes import Outcome
from maporl.sandbox.repeatable import repeatable
from maporl.sandbox.sandbox import UNCACHED, Limits, Sandbox
from trl_ext.process.waits import Threads, result, taken

LIMITS = Limits(cpu_seconds=1)
KEPT = 20_000
"""The outcomes of so many programs with their tests are kept."""
Tests = tuple[str, tuple[str, ...], str, str]
"""A program, its tests, the setup that runs before them, and the name of the function that they test."""


class SandboxPool:
    """Sandboxes that several threads share. A thread that finds all of them in use waits.

    ``workers``: how many there are, by default one for each core. A sandbox starts its process with its first program.

    Raises:
        SandboxError: no sandbox can work here.
        ValueError: ``workers`` is below 1.
    """

    def __init__(self, limits: Limits = LIMITS, workers: int | None = None):
        if workers is not None and workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        count = workers or os.cpu_count() or 1
        self._all = [Sandbox(limits, cache=False) for _ in range(count)]
        self._free: queue.LifoQueue[Sandbox] = queue.LifoQueue()
        for sandbox in self._all:
            self._free.put(sandbox)
        self._known: OrderedDict[Tests, list[Outcome]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[Sandbox]:
        """Lend a sandbox that no other thread uses."""
        sandbox = taken(self._free)
        try:
            yield sandbox
        finally:
            self._free.put(sandbox)

    def tested(self, code: str, asserts: Sequence[str], setup: str = "", name: str = "") -> list[Outcome]:
        """:meth:`maporl.sandbox.sandbox.Sandbox.run_tests` in a free sandbox. The same program with the same tests runs
        once.

        A program has the same random numbers each time, so it would end alike again. The outcomes of one that reads the
        clock are not kept, and neither are those that depend on what else the machine was doing.

        Raises:
            SandboxError: a worker process does not start.
        """
        key = (code, tuple(asserts), setup, name)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return list(self._known[key])
        with self.one() as sandbox:
            outcomes = sandbox.run_tests(code, asserts, setup, name)
        if not any(outcome.reason in UNCACHED for outcome in outcomes) and all(
            map(repeatable, (code, setup, *asserts))
        ):
            with self._lock:
                self._known[key] = list(outcomes)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return outcomes

    def run_tests(self, programs: Sequence[tuple[str, Sequence[str], str, str]]) -> list[list[Outcome]]:
        """:meth:`tested` for each of (code, asserts, setup, name), in order, as many at a time as there are sandboxes.

        Raises:
            SandboxError: a worker process does not start.
        """
        with Threads(len(self._all), "tests programs") as threads:
            return [result(one) for one in [threads.submit(self.tested, *program) for program in programs]]

    def close(self) -> None:
        """End all worker processes. The next program starts a new one."""
        for sandbox in self._all:
            sandbox.close()


def shared_pool(limits: Limits = LIMITS) -> SandboxPool:
    """Return the pool of this process with these limits, in which tasks run programs to grade them."""
    return _pool_with(limits)


@cache
def _pool_with(limits: Limits) -> SandboxPool:
    return SandboxPool(limits)
