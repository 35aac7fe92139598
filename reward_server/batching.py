"""Dynamic batching: what waits is scored together, in forwards of like lengths and bounded size.

Data flow: a request's chats -> one ``Work`` each in ``_waiting`` -> a worker of each scorer takes a batch whenever it is
free -> its scores resolve the futures of the works. While a forward runs, the next batch gathers.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from reward_server.schemas import ItemError
from reward_server.scorers import Prepared, Scorer
from reward_server.telemetry import Telemetry

logger = logging.getLogger(__name__)
Outcome = float | ItemError
PADDING, PADDING_TOKENS = 0.15, 128
"""A batch may be padding up to this share of it, or up to this many tokens, which cost less than one more forward."""
LINGER, MOST_LINGER = 0.05, 0.02
"""Before a batch is taken that is not full, those just answered may come back: this share of a forward, at most seconds."""


class QueueFull(Exception):
    """Too much is waiting. ``retry_after``: seconds until it is likely to have been scored."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full; retry after {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Work:
    """One chat that waits."""

    prepared: Prepared
    done: "asyncio.Future[Outcome]"


class Batcher:
    """Scores chats with several ``scorers``, each in a thread of its own."""

    def __init__(self, scorers: Sequence[Scorer], batch_tokens: int, queue_items: int, telemetry: Telemetry):
        self.scorers, self.batch_tokens, self.queue_items = scorers, batch_tokens, queue_items
        self.telemetry = telemetry
        self._waiting: list[Work] = []
        self._tokens_waiting = 0
        self._tokens_per_second = 1000.0
        self._arrived = asyncio.Event()
        self._pool = ThreadPoolExecutor(len(scorers), "scorer")
        self._workers: list[asyncio.Task] = []

    def start(self) -> None:
        """Begin to score; needs a running event loop."""
        self._workers = [asyncio.create_task(self._work(scorer)) for scorer in self.scorers]

    async def stop(self) -> None:
        """Stop scoring; what still waits is cancelled."""
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for work in self._waiting:
            work.done.cancel()
        self._pool.shutdown()

    async def score(self, prepared: Sequence[Prepared]) -> list[Outcome]:
        """One outcome for each, in order. Raises :class:`QueueFull` rather than let the queue grow beyond its bound."""
        if not prepared:
            return []
        if len(self._waiting) + len(prepared) > self.queue_items:
            seconds = self._tokens_waiting / self._tokens_per_second
            raise QueueFull(min(60, max(1, math.ceil(seconds))))
        loop = asyncio.get_running_loop()
        works = [Work(item, loop.create_future()) for item in prepared]
        self._waiting += works
        self._note_queue()
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(work.done for work in works)))
        except asyncio.CancelledError:  # nobody wants them any more
            for work in works:
                work.done.cancel()
            raise

    async def _work(self, scorer: Scorer) -> None:
        loop = asyncio.get_running_loop()
        seconds = 0.0
        while True:
            if seconds and self._tokens_waiting < self.batch_tokens:
                await asyncio.sleep(min(LINGER * seconds, MOST_LINGER))
            batch = self._take()
            if not batch:
                seconds = 0.0
                self._arrived.clear()
                await self._arrived.wait()
                continue
            started = time.perf_counter()
            payloads = [work.prepared.payload for work in batch]
            outcomes = await loop.run_in_executor(self._pool, _score, scorer, payloads)
            seconds = time.perf_counter() - started
            tokens = sum(work.prepared.length for work in batch)
            self._tokens_per_second += 0.1 * (tokens / max(seconds, 1e-6) - self._tokens_per_second)
            self.telemetry.batch(len(batch), seconds)
            for work, outcome in zip(batch, outcomes, strict=True):
                if not work.done.done():
                    work.done.set_result(outcome)

    def _take(self) -> list[Work]:
        """The next batch: what has waited longest, and what is nearest to it in length.

        As many as fit into ``batch_tokens`` without much padding, which costs as much as text.
        """
        self._waiting = [work for work in self._waiting if not work.done.done()]
        if not self._waiting:
            self._note_queue()
            return []
        oldest = self._waiting[0].prepared.length
        batch: list[Work] = []
        longest = tokens = 0
        for work in sorted(self._waiting, key=lambda work: abs(work.prepared.length - oldest)):
            longest, tokens = max(longest, work.prepared.length), tokens + work.prepared.length
            size = longest * (len(batch) + 1)
            if batch and (size > self.batch_tokens or size - tokens > max(PADDING * size, PADDING_TOKENS)):
                break
            batch.append(work)
        taken = set(map(id, batch))
        self._waiting = [work for work in self._waiting if id(work) not in taken]
        self._note_queue()
        return batch

    def _note_queue(self) -> None:
        self._tokens_waiting = sum(work.prepared.length for work in self._waiting)
        self.telemetry.waiting(len(self._waiting))


def _score(scorer: Scorer, payloads: list) -> list[Outcome]:
    """Scores of a batch; if it fails as a whole, each item alone, so that one cannot take others with it."""
    try:
        return [_checked(outcome) for outcome in scorer.score(payloads)]
    except Exception as error:
        logger.warning("a batch of %d failed: %s: %s", len(payloads), type(error).__name__, error)
        if len(payloads) > 1:
            return [outcome for payload in payloads for outcome in _score(scorer, [payload])]
        return [ItemError(code="scoring_failed", message=f"{type(error).__name__} while scoring; see the server's log")]


def _checked(outcome: Outcome) -> Outcome:
    if isinstance(outcome, ItemError) or 0.0 <= outcome <= 1.0:
        return outcome
    return ItemError(code="scoring_failed", message=f"the score is {outcome}, which is not in [0, 1]")
