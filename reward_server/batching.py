"""Dynamic batching: waiting chats are scored together, in forwards of similar lengths and bounded size.

Data flow: each chat of a request -> one ``Work`` in ``_waiting`` -> the thread of a scorer that is free takes a batch
-> the event loop resolves the futures of its works. While a forward runs, the next batch gathers.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from reward_server.schemas import ItemError
from reward_server.scorers import Prepared, Scorer
from reward_server.telemetry import Telemetry

logger = logging.getLogger(__name__)
Outcome = float | ItemError
PADDING, PADDING_TOKENS = 0.15, 128
"""A batch may hold this share of padding, or this many tokens of it: they cost less than one more forward."""


class QueueFull(Exception):
    """Too many chats are waiting. ``retry_after``: the seconds after which they have probably been scored."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full; retry after {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Work:
    """One chat that waits, and the future of its outcome."""

    prepared: Prepared
    done: "asyncio.Future[Outcome]"


class Batcher:
    """Scores chats with ``scorers``, each of which works in a thread of its own.

    ``batch_tokens``: the most tokens of a forward, with padding. ``queue_items``: the most chats that may wait.
    """

    def __init__(self, scorers: Sequence[Scorer], batch_tokens: int, queue_items: int, telemetry: Telemetry):
        self.scorers, self.batch_tokens, self.queue_items = scorers, batch_tokens, queue_items
        self.telemetry = telemetry
        self._waiting: list[Work] = []
        self._changed = threading.Condition()  # guards _waiting
        self._stopping = False
        self._tokens_per_second = 1000.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. Futures are resolved on the running event loop."""
        loop = asyncio.get_running_loop()
        self._threads = [
            threading.Thread(target=self._work, args=(scorer, loop), name="scorer", daemon=True)
            for scorer in self.scorers
        ]
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Stop after the batches in progress, and cancel the chats that still wait."""
        with self._changed:
            self._stopping = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for work in waiting:
            work.done.cancel()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    async def score(self, prepared: Sequence[Prepared]) -> list[Outcome]:
        """One outcome for each chat, in order.

        Raises:
            QueueFull: with these chats, more than ``queue_items`` would wait.
        """
        if not prepared:
            return []
        loop = asyncio.get_running_loop()
        works = [Work(item, loop.create_future()) for item in prepared]
        with self._changed:
            if len(self._waiting) + len(works) > self.queue_items:
                seconds = sum(work.prepared.length for work in self._waiting) / self._tokens_per_second
                raise QueueFull(min(60, max(1, math.ceil(seconds))))
            self._waiting += works
            self.telemetry.waiting(len(self._waiting))
            self._changed.notify()
        try:
            return list(await asyncio.gather(*(work.done for work in works)))
        except asyncio.CancelledError:  # nobody wants these scores any more
            for work in works:
                work.done.cancel()
            with self._changed:
                self._drop_cancelled()
            raise

    def _work(self, scorer: Scorer, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with self._changed:
                while not (batch := self._take()):
                    if self._stopping:
                        return
                    self._changed.wait()
            started = time.perf_counter()
            outcomes = _score(scorer, [work.prepared.payload for work in batch])
            seconds = time.perf_counter() - started
            tokens = sum(work.prepared.length for work in batch)
            self._tokens_per_second += 0.1 * (tokens / max(seconds, 1e-6) - self._tokens_per_second)
            self.telemetry.batch(len(batch), seconds)
            loop.call_soon_threadsafe(_resolve, batch, outcomes)

    def _drop_cancelled(self) -> None:
        self._waiting = [work for work in self._waiting if not work.done.done()]
        self.telemetry.waiting(len(self._waiting))

    def _take(self) -> list[Work]:
        """The next batch: the chat that has waited longest, and the chats nearest to it in length."""
        # only what fits into batch_tokens without much padding, because padding costs as much as text
        self._drop_cancelled()
        if not self._waiting:
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
        self.telemetry.waiting(len(self._waiting))
        return batch


def _resolve(batch: Sequence[Work], outcomes: Sequence[Outcome]) -> None:
    for work, outcome in zip(batch, outcomes, strict=True):
        if not work.done.done():
            work.done.set_result(outcome)


def _score(scorer: Scorer, payloads: list) -> list[Outcome]:
    """The outcomes of a batch. If the batch fails, each chat is scored alone, so that one chat fails alone."""
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
