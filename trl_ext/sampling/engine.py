"""The contract of an engine of tokens, which samples completions: token ids go in, and token ids come out."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trl_ext.process.waits import FIRST_COMPLETED, check, finished
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

T = TypeVar("T")


@dataclass(slots=True)
class Ready(Generic[T]):
    """A result that is there already. It answers as a future does, and is much smaller."""

    value: T

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> T:
        """Return the result."""
        return self.value


class TokenEngine:
    """The base class of engines of tokens. A subclass defines :meth:`submit`, and may override the hooks."""

    remote: bool = False
    """Whether the engine samples from its own copy of the weights, while those of this process are being updated."""
    between: bool = False
    """Whether it takes new weights between two answers of a dialogue. Otherwise dialogues end before :meth:`sync`."""
    continuous: bool = False
    """Whether completions come one by one, so that a dialogue can go on before others have their answers."""
    tells_cut: bool = False
    """Whether its log-probabilities are those of what ``top_p`` and ``top_k`` leave, and not of the whole distribution,
    which is trained. They cannot be compared then."""

    ends_with_eos: bool = False
    """Whether the tokenizer's own EOS token alone may end a completion that is held to a grammar."""

    def submit(self, requests: Sequence[TokenRequest]) -> Sequence[Future[Sampled] | Ready[Sampled]]:
        """Begin to sample, and return one completion to come for each request, in order.

        What was sampled is what is trained on: a completion has all its tokens. It may go on after a stop string,
        which :meth:`Sampled.up_to` cuts off.
        """
        raise NotImplementedError(f"{type(self).__name__}: an engine of tokens defines submit(requests)")

    def advance(self) -> bool:
        """Hook: work for a moment on what was submitted, if this is done in this thread.

        Return whether there is more to do.
        """
        return False

    def sync(self, policy: str, version: int) -> None:
        """Hook: take over the weights of ``policy``, which are new or have changed, and have had ``version`` updates.

        All processes call this together, and before the first :meth:`submit` too. They do not call :meth:`submit`
        together, so :meth:`submit` must not wait for other processes.
        """

    def release(self) -> None:
        """Hook: drop what was kept of conversations and what is left of submitted requests, because these have
        ended."""

    def metrics(self) -> dict[str, float]:
        """Hook: return metrics to log after every update."""
        return {}

    def sample(self, requests: Sequence[TokenRequest]) -> list[Sampled]:
        """Return one completion for each request, in order, for which this waits."""
        futures = self.submit(requests)
        try:
            wait_for([futures], self.advance)
        except BaseException:
            for future in futures:
                if isinstance(future, Future):
                    future.cancel()
            raise
        return [future.result() for future in futures]


def wait_for(
    groups: Sequence[Sequence[Future[Any] | Ready[Any]]], advance: Callable[[], bool], every: bool = True
) -> list[int]:
    """Wait until all futures of a group are done, or those of every group. Return the numbers of the groups that are
    done.

    Args:
        groups: the futures, for example those of each dialogue.
        advance: does a part of the work that is done in this thread, and returns whether there is more to do.
        every: whether to wait for every group.

    Raises:
        Exception: what a future raised. The others are not waited for.
    """
    while True:
        done: list[int] = []
        left: list[Any] = []
        for number, group in enumerate(groups):
            before = len(left)
            for future in group:
                if isinstance(future, Ready):
                    continue
                if future.done():
                    future.result()
                else:
                    left.append(future)
            if len(left) == before:
                done.append(number)
        if len(done) == len(groups) or (done and not every):
            return done
        if advance():
            check()
        else:
            finished(left, when=FIRST_COMPLETED)
