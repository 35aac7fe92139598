"""Play the dialogues of the next updates while the current one is trained on. Imports no torch.

Batches are trained on whole, in the order in which they were begun. Batch ``n`` is begun after ``n - 1 - depth``
updates, or later, and trains weights of ``n - 1`` updates. So its answers are at most ``depth`` updates old, nothing
that was begun is dropped, and slow dialogues are trained on as others are.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

from maporl.errors import Fault
from maporl.rollout.interleaving import Interleaving
from trl_ext.process.waits import Threads, finished, result

Batch = TypeVar("Batch")


def faults(
    depth: int,
    remote: Mapping[str, bool],
    between: Mapping[str, bool],
    untrained: str | None,
    corrected: bool,
    past: bool,
    processes: int = 1,
) -> Iterator[Fault]:
    """Yield why ``async_depth`` cannot be ``depth``, which is above 0.

    Args:
        depth: the most updates by which dialogues may be older than the weights that they train.
        remote: for each engine, whether it samples from its own copy of the weights.
        between: for each engine, whether it takes new weights between two answers of a dialogue.
        untrained: the option by which the weights before training are asked, or None.
        corrected: whether a ratio to the policy that sampled corrects for older weights.
        past: whether past policies play.
        processes: the number of processes that train together.
    """
    key = "training.async_depth"
    here = sorted(name for name, elsewhere in remote.items() if not elsewhere)
    if here or untrained is not None:
        what = f"engine {here[0]!r} answers" if here else f"{untrained} asks"
        what = f"{depth} plays while weights change, and {what} with those weights"
        yield Fault(key, what, "use cluster.backend: ray or engine: vllm, or async_depth: 0")
    if not corrected:
        what = f"{depth} trains on dialogues of older weights"
        yield Fault(key, what, "set ratio_to: sampler, with which they cost least, or engine_tis_cap")
    if processes > 1:
        yield Fault(key, f"{depth} needs a single process; this run has {processes}")
    if depth > 1 and past:
        what = f"{depth} plays several batches at once, and schedule.opponent_pool gives each its own past weights"
        yield Fault(key, what, "use async_depth: 1")
    if depth > 1 and (ended := sorted(name for name, takes in between.items() if not takes)):
        what = (
            f"{depth} needs engines that take new weights while dialogues go on, and with {ended[0]!r} dialogues end "
            "first, so that more than 1 brings nothing"
        )
        yield Fault(key, what, "use cluster.backend: ray with cluster.on_update: finish, or async_depth: 1")


def batches_to_begin(number: int, in_progress: int, depth: int, last: int) -> range:
    """Return the numbers of the batches to begin after ``number - 1`` updates.

    Args:
        number: the number of the next batch to train on.
        in_progress: how many batches from it on were begun.
        depth: the most updates by which dialogues may be older than the weights that they train.
        last: the number of the run's last batch.
    """
    return range(number + in_progress, min(number + depth, last) + 1)


class Ahead(Generic[Batch]):
    """Plays batches in background threads, and returns them in the order in which they were begun.

    Args:
        depth: the most batches that are played beside the next one.
        interleaving: lets one thread play at a time.
    """

    def __init__(self, depth: int, interleaving: Interleaving) -> None:
        self._depth, self._interleaving = depth, interleaving
        self._threads = self._new_threads()
        self._begun: deque[Future[Batch]] = deque()

    @property
    def in_progress(self) -> int:
        """The number of batches that were begun and not taken."""
        return len(self._begun)

    def begin(self, play: Callable[[], Batch]) -> None:
        """Start ``play`` in the background."""

        def work() -> Batch:
            with self._interleaving.running():
                return play()

        self._begun.append(self._threads.submit(work))

    def settle(self) -> None:
        """Wait until all batches in progress are played."""
        finished(self._begun)

    def take(self) -> Batch:
        """Return the batch that was begun first, for which this waits."""
        first = self._begun.popleft()
        return result(first)

    def drop(self) -> None:
        """Give up the batches in progress. Their threads end at their next wait."""
        self._threads.give_up()
        self._threads = self._new_threads()
        self._begun.clear()

    def _new_threads(self) -> Threads:
        return Threads(self._depth + 1, "rollouts")
