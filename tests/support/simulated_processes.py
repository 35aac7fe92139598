"""Processes that train together, as threads of this process: the trainer's steps on 2 or 4 processes, in a moment.

Threads take turns: one works until it must wait for the others. What crosses between processes is pickled. What
``torch.distributed`` itself does is missing, which ``tests/system/test_distributed.py`` tests with real processes.
"""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from trl_ext.process import distributed

Result = TypeVar("Result")
_OWN = threading.local()


class Processes:
    """``count`` processes. What is built outside of :meth:`run` is built as the main process builds it."""

    def __init__(self, count: int):
        self.count = count
        self._turn = threading.Lock()
        self._met = threading.Barrier(count)
        self._values: list[bytes] = [b""] * count

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let this library take the threads of :meth:`run` for processes."""
        names = {
            "size": lambda: self.count,
            "rank": self._rank,
            "is_main": lambda: self._rank() == 0,
            "all_gather": self._gathered,
            "to_main": lambda items: (
                [i for part in self._gathered(items) for i in part] if self._rank() == 0 else items
            ),
            "broadcast_from_main": lambda value: self._gathered(value)[0],
            "all_reduce_sum": lambda numbers, device: [sum(own) for own in zip(*self._gathered(numbers), strict=True)],
            "all_reduce_max": lambda number, device: max(self._gathered(number)),
            "all_reduce_tensors": self._refused,
            "broadcast_weights": lambda tensors: None,  # every thread builds the same weights
            "check_launcher": lambda: None,
            "barrier": lambda: self._gathered(None) and None,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, replacement in names.items():
                patch.setattr(distributed, name, replacement)
            yield

    def run(self, works: list[Callable[[], Result]]) -> list[Result]:
        """Run one work in each process, one at a time, and return their results.

        Raises:
            BaseException: the first that was raised by a work. The other threads then do not wait for it.
        """
        results: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            _OWN.rank = rank
            with self._turn:
                try:
                    results[rank] = works[rank]()
                except BaseException as error:
                    errors.append(error)
                    self._met.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results

    def _rank(self) -> int:
        return getattr(_OWN, "rank", 0)

    def _gathered(self, value: Any) -> list[Any]:
        if not hasattr(_OWN, "rank"):  # a process that is being built waits for nobody
            return [value] * self.count
        self._values[_OWN.rank] = pickle.dumps(value)
        self._wait()
        found = [pickle.loads(own) for own in self._values]
        self._wait()
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._met.wait(timeout=100)
        finally:
            self._turn.acquire()

    def _refused(self, tensors: Any) -> None:
        raise AssertionError("gradients were exchanged, which these processes do not do")
