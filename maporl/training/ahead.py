"""Playing the next batch while this one is learned from. Imports no torch."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


def check_ahead(remote: Mapping[str, bool], restate: str, engine_tis_cap: float | None, processes: int = 1) -> None:
    """Check that ``async_depth: 1`` can work.

    Args:
        remote: by engine, whether it answers with weights of its own while those of this process are being updated.
        restate: ``base_model`` where the untrained model restates answers.
        engine_tis_cap: the cap of the importance weights that correct for older weights; None: no correction.
        processes: how many train together.

    Raises:
        ValueError: playing ahead would need weights that are being updated, or nothing corrects for older ones.
    """
    here = sorted(name for name, elsewhere in remote.items() if not elsewhere)
    if here or restate != "off":
        what = f"engine {here[0]!r} answers" if here else "restate: base_model speaks"
        raise ValueError(
            f"async_depth: 1 plays while weights change, and {what} with those weights; use engine: vllm, or async_depth: 0"
        )
    if engine_tis_cap is None:
        raise ValueError(
            "async_depth: 1 learns from dialogues of older weights; set engine_tis_cap, e.g. 2.0, which corrects for it"
        )
    if processes > 1:
        raise ValueError("async_depth: 1 needs a single process; this run has several")


class Ahead(Generic[Batch]):
    """One batch at most, played by a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: Future[Batch] | None = None

    def begin(self, play: Callable[[], Batch]) -> None:
        """Play a batch in the background."""
        self._pending = self._thread.submit(play)

    def settle(self) -> None:
        """Wait for the batch that is being played, so that nobody speaks while weights are sent."""
        if self._pending is not None:
            wait([self._pending])

    def take(self) -> Batch | None:
        """The batch that was played, once; None where none was begun."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()
