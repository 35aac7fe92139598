"""Several sandboxes, so that programs run on all cores."""

import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from maporl.sandbox.compare import judge
from maporl.sandbox.outcomes import Outcome
from maporl.sandbox.sandbox import Limits, Sandbox

LIMITS = Limits(cpu_seconds=1)


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

    @contextmanager
    def one(self) -> Iterator[Sandbox]:
        """Lend a sandbox that no other thread uses."""
        sandbox = self._free.get()
        try:
            yield sandbox
        finally:
            self._free.put(sandbox)

    def run_tests(self, programs: Sequence[tuple[str, Sequence[str], str]]) -> list[list[Outcome]]:
        """:func:`tested` for each of (code, asserts, setup), in order, as many at a time as there are sandboxes.

        Raises:
            SandboxError: a worker process does not start.
        """

        def run(program: tuple[str, Sequence[str], str]) -> list[Outcome]:
            with self.one() as sandbox:
                return tested(sandbox, *program)

        with ThreadPoolExecutor(len(self._all)) as threads:
            return list(threads.map(run, programs))

    def close(self) -> None:
        """End all worker processes. The next program starts a new one."""
        for sandbox in self._all:
            sandbox.close()


def tested(sandbox: Sandbox, code: str, asserts: Sequence[str], setup: str = "") -> list[Outcome]:
    """Return an outcome for each of the ``asserts`` about a program.

    An assert that compares with a literal is judged outside the program's process too (:func:`maporl.sandbox.compare.judge`),
    because an object of the program may say that it is equal to everything.

    Raises:
        SandboxError: a worker process does not start.
    """
    outcomes = sandbox.run_asserts(code, asserts, setup)
    ran = [number for number, outcome in enumerate(outcomes) if outcome.ok]
    for number, passes in zip(ran, judge(sandbox, code, setup, [asserts[n] for n in ran]), strict=True):
        if passes is False:
            outcomes[number] = Outcome(None, "error:AssertionError", message="AssertionError")
    return outcomes
