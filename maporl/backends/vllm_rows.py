"""vLLM in a process that samples for a group: rows join while others run, and come back one by one."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from maporl.config.schema import VLLMSection
from maporl.engines.vllm.engine import VLLMEngine
from maporl.team.agents import Policy
from trl_ext.ppo.options import PPOOptions
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

PAUSE = 0.02
"""The seconds for which a call waits for answers while vLLM works."""
PROBED = 100
"""vLLM's probabilities are compared with those of the policy here after the first weights, and after every so many."""


class VLLMRows:
    """A vLLM for each base of ``policies``, which works in a thread of its own between the calls of this process.

    Its weights are copied from the models of the policies, which stay in main memory.

    Args:
        policies: the policies by name.
        sections: the options of vLLM by policy.
        options: the temperature of the run.
        folder: where adapters are written for vLLM to read.

    Raises:
        ConfigError: the package ``vllm`` is not installed.
        VLLMFailure: vLLM does not start.
    """

    def __init__(
        self, policies: Mapping[str, Policy], sections: Mapping[str, VLLMSection], options: PPOOptions, folder: Path
    ):
        self._engine = VLLMEngine(policies, sections, options.temperature, folder, probe_every=PROBED)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vLLM")
        self._running: dict[int, Future[Sampled] | Ready[Sampled]] = {}
        """What vLLM works on, by number. Only its thread changes this."""
        self._finished: dict[int, Sampled] = {}
        self._failed: Exception | None = None
        self._changed = threading.Condition()

    def sample(self, rows: Mapping[int, TokenRequest]) -> dict[int, Sampled]:
        """Begin with ``rows``, by number, and return the completions of earlier and of these rows that are there.

        This waits until all are there, or for a moment.

        Raises:
            VLLMFailure: vLLM does not take a row.
            Exception: what vLLM raised.
        """
        if rows:
            self._thread.submit(self._safely, lambda: self._begin(rows)).result()
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._failed is not None, PAUSE)
            if self._failed is not None:
                raise self._failed
            finished, self._finished = self._finished, {}
        return finished

    def finish(self) -> None:
        """Let what has begun end. Its completions are returned by the next :meth:`sample`."""

        def work() -> None:
            while self._running:
                self._step()

        self._thread.submit(self._safely, work).result()

    def sync(self, policy: str, version: int) -> None:
        """Copy the weights of a policy into vLLM, after :meth:`finish`.

        Raises:
            VLLMFailure: vLLM does not take them, or has other ones afterwards.
        """
        self._thread.submit(self._engine.sync, policy, version).result()

    def release(self) -> None:
        """Let vLLM give its memory back until the next row, if nothing is running and ``sleep`` is set."""

        def work() -> None:
            if not self._running:
                self._engine.release()

        self._thread.submit(work).result()

    # -- in vLLM's thread -------------------------------------------------------------------------------------------

    def _begin(self, rows: Mapping[int, TokenRequest]) -> None:
        idle = not self._running
        begun = self._engine.submit(list(rows.values()))
        with self._changed:
            self._running |= zip(rows, begun, strict=True)
        if idle:
            self._thread.submit(self._safely, self._work)

    def _work(self) -> None:
        """Take one step, and the next one after whatever else was asked of this thread."""
        self._step()
        if self._running:
            self._thread.submit(self._safely, self._work)

    def _step(self) -> None:
        self._engine.advance()
        sampled = {number: future.result() for number, future in self._running.items() if future.done()}
        with self._changed:
            self._finished |= sampled
            for number in sampled:
                del self._running[number]
            self._changed.notify_all()

    def _safely(self, work: Any) -> None:
        """Do ``work``. Calls raise what it raises."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()
