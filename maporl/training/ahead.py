"""Play the next batch of dialogues while the current one is trained on. Imports no torch."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


def check_ahead(
    remote: Mapping[str, bool], untrained: str | None, engine_tis_cap: float | None, processes: int = 1
) -> None:
    """Check that ``async_depth: 1`` can work.

    Args:
        remote: for each engine, whether it samples from its own copy of the weights.
        untrained: the option by which the weights before training are asked, or None.
        engine_tis_cap: the cap of the importance weights that correct for older weights. None means no correction.
        processes: the number of processes that train together.

    Raises:
        ValueError: an engine samples from the weights that are being updated, or older weights are not corrected for,
            or several processes train together.
    """
    here = sorted(name for name, elsewhere in remote.items() if not elsewhere)
    if here or untrained is not None:
        what = f"engine {here[0]!r} answers" if here else f"{untrained} asks"
        raise ValueError(
            f"async_depth: 1 plays while weights change, and {what} with those weights; use engine: vllm, or async_depth: 0"
        )
    if engine_tis_cap is None:
        raise ValueError(
            "async_depth: 1 trains on dialogues of older weights; set engine_tis_cap, e.g. 2.0, which corrects for this"
        )
    if processes > 1:
        raise ValueError("async_depth: 1 needs a single process; this run has several")


class Ahead(Generic[Batch]):
    """Plays at most one batch in a background thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: Future[Batch] | None = None

    def begin(self, play: Callable[[], Batch]) -> None:
        """Start ``play`` in the background."""
        self._pending = self._thread.submit(play)

    def settle(self) -> None:
        """Wait until the background batch is played, so that no engine samples while new weights are sent to it."""
        if self._pending is not None:
            wait([self._pending])

    def take(self) -> Batch | None:
        """Return the batch that was played in the background, or None if no batch was started. It is returned once."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()
