"""Asking verifier servers for scores: maporl's own reward server, or a reward model behind vLLM.

Data flow: chats -> requests of ``batch_size`` chats, sent concurrently -> for each, attempts at one server after the
other until one answers -> one outcome for each chat, a score or the failure that stands for it.
"""

import logging
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import tenacity

from maporl.config.schema import TOKEN_VARIABLE, VerifierSection
from maporl.errors import ConfigError
from maporl.rewards.base import RewardFailure
from maporl.rewards.verifier.encoding import encode
from maporl.rewards.verifier.model import read_record, temperature_of
from maporl.types import Message

logger = logging.getLogger(__name__)
URLS_VARIABLE = "MAPORL_VERIFIER_URLS"
"""Comma-separated URLs, for configurations that name none."""
COUNTED = ("requests", "retries", "ejected", "waits", "failures", "labelled")

Outcome = float | RewardFailure


class VerifierFailure(RewardFailure):
    """A server gave no usable scores; ``url`` names it."""

    def __init__(self, url: str, message: str):
        super().__init__(f"verifier server {url}: {message}")
        self.url = url


class Unavailable(VerifierFailure):
    """A server that may do better later: it cannot be reached, is too busy, or failed. ``retry_after``: seconds."""

    def __init__(self, url: str, message: str, retry_after: float = 0.0):
        super().__init__(url, message)
        self.retry_after = retry_after


def server_urls(section: VerifierSection) -> tuple[str, ...]:
    """The servers of a configuration: its own, else those in the environment unless it names a model to load here."""
    if section.urls:
        return tuple(section.urls)
    named = os.environ.get(URLS_VARIABLE, "") if section.model is None else ""
    return tuple(url.strip() for url in named.split(",") if url.strip())


class Servers:
    """Takes turns among ``urls``; one that failed sits out for a while, longer each time, and is then tried again."""

    SECONDS_OUT = 1.0
    MOST_SECONDS_OUT = 60.0

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._back = dict.fromkeys(urls, 0.0)
        self._failures: Counter[str] = Counter()
        self._next = 0

    def take(self) -> str:
        """The next server that is in; if none is, the one that is back first."""
        with self._lock:
            now, urls = self._clock(), list(self._back)
            for step in range(len(urls)):
                url = urls[(self._next + step) % len(urls)]
                if self._back[url] <= now:
                    self._next = (self._next + step + 1) % len(urls)
                    return url
            return min(urls, key=lambda url: self._back[url])

    def eject(self, url: str) -> bool:
        """Let a server sit out; returns whether it was in until now."""
        with self._lock:
            now = self._clock()
            was_in = self._back[url] <= now
            if was_in:
                seconds = min(self.MOST_SECONDS_OUT, self.SECONDS_OUT * 2 ** self._failures[url])
                self._failures[url] += 1
                self._back[url] = now + seconds
            return was_in

    def restore(self, url: str) -> None:
        """A server answered: it is in, and its failures are forgotten."""
        with self._lock:
            self._back[url] = 0.0
            self._failures[url] = 0


class VerifierClient:
    """Scores chats at servers. Safe to use from one thread at a time; sends its own requests from several."""

    def __init__(self, section: VerifierSection, urls: Sequence[str]):
        self.section = section
        self.urls = tuple(url.rstrip("/") for url in urls)
        for url in self.urls:  # those of the environment have not been checked
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{URLS_VARIABLE}: expected http://HOST:PORT, got {url!r}")
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx2.Limits(max_connections=section.concurrency)
        self._http = httpx2.Client(timeout=section.timeout, headers=headers, limits=limits)
        self._servers = Servers(self.urls)
        self._ask = {"maporl": self._ask_maporl, "vllm": self._ask_vllm}[section.api]
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._vllm = VLLM(section) if section.api == "vllm" else None

    def count(self, name: str, by: int = 1) -> None:
        """Count something for the metrics."""
        with self._lock:
            self._counts[name] += by

    def take_counts(self) -> dict[str, int]:
        """The counts since they were last taken."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {name: taken[name] for name in COUNTED}

    def scores(self, chats: Sequence[list[Message]], references: Sequence[str]) -> list[Outcome]:
        """A score in [0, 1] of each chat's last message, or why it has none.

        Raises the failure of a server unless ``on_failure`` is ``label``.
        """
        size = self.section.batch_size
        starts = range(0, len(chats), size)
        with ThreadPoolExecutor(min(self.section.concurrency, max(1, len(starts)))) as pool:
            parts = [pool.submit(self._request, chats[i : i + size], references[i : i + size]) for i in starts]
            try:
                return [outcome for part in parts for outcome in part.result()]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _request(self, chats: Sequence[list[Message]], references: Sequence[str]) -> Sequence[Outcome]:
        """One request, attempted until it is answered. Its id stays, so that no server scores it twice."""
        request_id = uuid.uuid4().hex
        patient = self.section.on_failure == "wait"
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
            stop=tenacity.stop_never if patient else tenacity.stop_after_attempt(self.section.retries + 1),
            wait=_pause,
            before_sleep=self._note_retry,
            reraise=True,
        )
        try:
            return retrying(self._attempt, request_id, chats, references)
        except VerifierFailure as failure:
            self.count("failures")
            if self.section.on_failure == "label":
                return [failure] * len(chats)
            raise

    def _note_retry(self, state: tenacity.RetryCallState) -> None:
        self.count("retries")
        if state.attempt_number > self.section.retries:
            self.count("waits")
        error = state.outcome.exception() if state.outcome else None
        level = logging.WARNING if state.attempt_number >= self.section.retries else logging.INFO
        logger.log(level, "%s; attempt %d, next in %.1f s", error, state.attempt_number, state.upcoming_sleep)

    def _attempt(self, request_id: str, chats: Sequence[list[Message]], references: Sequence[str]) -> Sequence[Outcome]:
        url = self._servers.take()
        self.count("requests")
        try:
            outcomes = self._ask(url, request_id, chats, references)
        except (httpx2.TransportError, Unavailable) as error:
            busy = isinstance(error, Unavailable) and error.retry_after > 0
            if not busy and self._servers.eject(url):
                self.count("ejected")
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(url, f"cannot be reached ({type(error).__name__}: {error})") from error
        self._servers.restore(url)
        return outcomes

    def _post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that a server answers; anything else is a failure that names it."""
        answer = self._http.post(f"{url}{path}", json=body)
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            after = answer.headers.get("retry-after", "")
            seconds = float(after) if after.isdigit() else 0.0
            raise Unavailable(url, f"answered {answer.status_code}{_said(answer)}", seconds)
        if answer.status_code != 200:
            raise VerifierFailure(url, f"answered {answer.status_code}{_said(answer)}")
        try:
            found = answer.json()
        except ValueError as error:
            raise VerifierFailure(url, f"answered with something that is not JSON: {answer.text[:80]!r}") from error
        if not isinstance(found, dict):
            raise VerifierFailure(url, f"expected a JSON object, got {type(found).__name__}")
        return found

    def _ask_maporl(
        self, url: str, request_id: str, chats: Sequence[list[Message]], references: Sequence[str]
    ) -> Sequence[Outcome]:
        body = {"request_id": request_id, "chats": list(chats), "references": list(references)}
        results = self._post(url, "/v1/score", body).get("results")
        if not isinstance(results, list) or len(results) != len(chats):
            got = len(results) if isinstance(results, list) else results
            raise VerifierFailure(url, f"expected {len(chats)} results, got {got!r:.80}")
        return [self._outcome(url, result) for result in results]

    def _outcome(self, url: str, result: Any) -> Outcome:
        """A result as the server describes it; one chat's own error is the others' business only if it stops the run."""
        error = result.get("error") if isinstance(result, dict) else None
        if error is None:
            return _score(url, result.get("score") if isinstance(result, dict) else result)
        failure = VerifierFailure(url, f"could not score an answer: {error.get('code')}: {error.get('message')}")
        if self.section.on_failure != "label":
            raise failure
        return failure

    def _ask_vllm(
        self, url: str, request_id: str, chats: Sequence[list[Message]], references: Sequence[str]
    ) -> Sequence[Outcome]:
        assert self._vllm is not None  # made for this interface
        found = self._post(url, "/classify", self._vllm.body(request_id, chats)).get("data")
        if not isinstance(found, list) or len(found) != len(chats):
            got = len(found) if isinstance(found, list) else found
            raise VerifierFailure(url, f"expected data on {len(chats)} inputs, got {got!r:.80}")
        return [self._vllm.score(url, item) for item in sorted(found, key=lambda item: item["index"])]


class VLLM:
    """How a verifier is asked when ``vllm serve DIR --runner pooling`` serves it: token ids in, probabilities out.

    ``reward.verifier.model`` names the folder, for its tokenizer and temperature; vLLM must serve it under this name.
    """

    def __init__(self, section: VerifierSection):
        from transformers import AutoTokenizer

        if section.model is None:
            raise ConfigError("reward.verifier: api vllm needs 'model', whose tokenizer encodes the chats; add it")
        self.model = section.model
        self.tokenizer = AutoTokenizer.from_pretrained(section.model)
        self.temperature = temperature_of(read_record(section.model))

    def body(self, request_id: str, chats: Sequence[list[Message]]) -> dict[str, Any]:
        """The request."""
        return {"model": self.model, "request_id": request_id, "input": [encode(self.tokenizer, c) for c in chats]}

    def score(self, url: str, item: dict[str, Any]) -> float:
        """The probability of being right: of the only class, or of the second of two; the temperature applied."""
        probabilities = item.get("probs")
        if not isinstance(probabilities, list) or len(probabilities) not in (1, 2):
            raise VerifierFailure(url, f"expected probabilities of one class or two, got {probabilities!r:.80}")
        p = _score(url, probabilities[-1])
        if self.temperature == 1.0 or p in (0.0, 1.0):
            return p
        return 1 / (1 + math.exp(-math.log(p / (1 - p)) / self.temperature))


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds to the next attempt: exponential with jitter, and not before the server wants to be asked again."""
    error = state.outcome.exception() if state.outcome else None
    wanted = error.retry_after if isinstance(error, Unavailable) else 0.0
    return max(wanted, tenacity.wait_random_exponential(multiplier=0.2, max=10)(state))


def _said(answer: httpx2.Response) -> str:
    """What an error body says, in maporl's form if it has it."""
    try:
        error = answer.json()["error"]
        field = f" at {error['field']}" if error.get("field") else ""
        return f" ({error['code']}{field}: {error['message']})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f" ({answer.text[:200]!r})" if answer.text else ""


def _score(url: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise VerifierFailure(url, f"expected a score in [0, 1], got {value!r:.80}")
    return float(value)
