"""Samples answers from policies on a service."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import Any, Protocol

from maporl.integrations.tinker.service import ServiceFailure, plain
from trl_ext.process.waits import Threads
from trl_ext.sampling.engine import Ready, TokenEngine
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import Draw, TokenRequest


class Samplers(Protocol):
    """What says where a policy is sampled from: the home of a run."""

    def sampler(self, policy: str) -> Any:
        """Return the SDK's client that samples from the present weights of ``policy``."""
        ...

    def update_sampler(self, policy: str) -> None:
        """Let :meth:`sampler` have the present weights of ``policy`` from now on."""
        ...

    def revive(self, policy: str, sampler: Any, error: BaseException) -> Exception | None:
        """Open the session of ``policy`` again if ``error`` says that it is lost, unless this was done since it had
        ``sampler``. Otherwise return what the error means."""
        ...


class TinkerEngine(TokenEngine):
    """Samples from policies on a service, which samples what is asked for together.

    Args:
        samplers: where each policy is sampled from.
        between: whether weights change between the answers of a dialogue (``cluster.on_update``).
    """

    remote = True
    continuous = True

    def __init__(self, samplers: Samplers, between: bool):
        self.samplers, self.between = samplers, between
        self._versions: dict[str, int] = {}
        self._reviving = Threads(4, "opens a session again", for_all=True)

    def submit(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled] | Ready[Sampled]]:
        """Begin to sample one completion for each request.

        Raises:
            ServiceFailure: the service does not answer.
        """
        refused = Ready(Sampled([], refused="the service has no grammars"))
        return [
            self._ask(request, Future(), again=True) if request.draw.grammar is None else refused
            for request in requests
        ]

    def sync(self, policy: str, version: int) -> None:
        """Sample from the present weights of ``policy`` from now on."""
        self.samplers.update_sampler(policy)
        self._versions[policy] = version

    def _ask(self, request: TokenRequest, answer: Future[Sampled], again: bool) -> Future[Sampled]:
        sampler, version = self.samplers.sampler(request.policy), self._versions.get(request.policy)

        def answered(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                _set(answer, lambda: _completion(request, done.result(), version))
            else:
                self._reviving.submit(failed, error)

        def failed(error: BaseException) -> None:
            try:
                meant = self.samplers.revive(request.policy, sampler, error)
                if meant is not None or not again:
                    raise meant or error
                self._ask(request, answer, again=False)
            except Exception as found:
                _set(answer, found)

        asked = sampler.sample(_prompt(request.prompt_ids), 1, _parameters(request.draw, request.key))
        plain(asked).add_done_callback(answered)
        return answer


def _set(answer: Future[Sampled], found: Exception | Callable[[], Sampled]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        if isinstance(found, Exception):
            raise found
        answer.set_result(found())
    except Exception as error:
        answer.set_exception(error)


def seed_of(key: tuple) -> int:
    """Return the seed of the answer with a ``key``, between 0 and 2**31 - 1.

    >>> seed_of((0, "ann", 1)) == seed_of((0, "ann", 1)), 0 <= seed_of((0, "bob", 1)) < 2**31
    (True, True)
    """
    return int.from_bytes(sha256(repr(key).encode()).digest()[:4], "big") >> 1


def _prompt(ids: Sequence[int]) -> Any:
    import tinker

    return tinker.ModelInput.from_ints(list(ids))


def _parameters(draw: Draw, key: tuple | None = None) -> Any:
    import tinker

    # token ids and strings exclude each other; a text is cut at a string here (Sampled.up_to)
    stop: list[Any] = sorted(draw.stop_ids) or list(draw.stop)
    options: Any = {"stop": stop, "temperature": draw.temperature, "top_p": draw.top_p, "top_k": draw.top_k or -1}
    return tinker.SamplingParams(max_tokens=draw.max_tokens, seed=None if key is None else seed_of(key), **options)


def _completion(request: TokenRequest, response: Any, version: int | None) -> Sampled:
    """Return an answer of the service.

    Raises:
        ServiceFailure: it has no tokens, or lacks log-probabilities or the token that ended it.
    """
    sequence = response.sequences[0]
    ids, logprobs = list(map(int, sequence.tokens)), sequence.logprobs
    drawn = request.draw.temperature > 0
    lacks = (
        "tokens"
        if not ids
        else "log-probabilities"
        if drawn and (logprobs is None or len(logprobs) != len(ids))
        else ""
    )
    if not lacks and sequence.stop_reason == "stop" and request.draw.stop_ids and ids[-1] not in request.draw.stop_ids:
        lacks = "the token that ended it"
    if lacks:
        raise ServiceFailure(f"{request.label}: the service's answer lacks {lacks}, so that nothing can learn from it")
    return Sampled(ids, list(map(float, logprobs)) if drawn else None, version)


def greedy(prompt: Sequence[int], sampler: Any, draw: Draw) -> Any:
    """Ask for the greedy completion of a prompt, and return the SDK's future of it."""
    return sampler.sample(_prompt(prompt), 1, _parameters(draw))


def prompt_logprobs(sampler: Any, ids: Sequence[int]) -> Any:
    """Ask for the log-probability of each of ``ids`` after those before it, and return the SDK's future of them.

    The last one is that of the last id. Some servers tell None of the first id, and others leave it out.
    """
    return sampler.compute_logprobs(_prompt(ids))
