"""Asking verifier servers for scores: maporl's own reward server, or a reward model behind vLLM.

Data flow: chats -> requests of ``batch_size`` chats, sent concurrently -> for each request, one server after the other
is tried until one answers -> one outcome for each chat: a score, or the failure to score it.
"""

import json
import logging
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tenacity

from maporl.config.schema import TOKEN_VARIABLE
from maporl.errors import ConfigError
from maporl.http_client import HttpClient, HttpFailure, persistent, shown_url
from maporl.rewards.base import RewardFailure
from maporl.rewards.identity import Identity
from maporl.types import Message
from maporl.verifier.encoding import encode
from maporl.verifier.model import read_record, temperature_of
from maporl.verifier.section import VerifierSection
from trl_ext.process.waits import Threads, result

logger = logging.getLogger(__name__)
URLS_VARIABLE = "MAPORL_VERIFIER_URLS"
"""The environment variable with comma-separated URLs, for configurations that name none."""
_LONGEST_DIGEST = 128
COUNTED = ("requests", "retries", "ejected", "waits", "failures", "labelled")

Outcome = float | RewardFailure


class VerifierFailure(RewardFailure):
    """The server at ``url`` gave no usable scores."""

    def __init__(self, url: str, message: str):
        super().__init__(f"verifier server {shown_url(url)}: {message}")
        self.url = url


class Unavailable(VerifierFailure):
    """A server that may answer later: it cannot be reached, is too busy, or failed.

    ``retry_after``: the seconds that a busy server asks to be given, else 0.
    """

    passing = True

    def __init__(self, url: str, message: str, retry_after: float = 0.0):
        super().__init__(url, message)
        self.retry_after = retry_after


def server_urls(section: VerifierSection) -> tuple[str, ...]:
    """The servers of a configuration. If it names neither servers nor a model, the environment may name servers."""
    if section.urls:
        return tuple(section.urls)
    named = os.environ.get(URLS_VARIABLE, "") if section.model is None else ""
    return tuple(url.strip() for url in named.split(",") if url.strip())


class Servers:
    """Takes turns among the servers at ``urls``.

    A server that failed is left out for a while, which doubles with each failure, and is then tried again.
    """

    SECONDS_OUT = 1.0
    MOST_SECONDS_OUT = 60.0

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._back = dict.fromkeys(urls, 0.0)
        self._failures: Counter[str] = Counter()
        self._next = 0

    def take(self) -> str:
        """The next server that is not left out, or else the one that comes back first."""
        with self._lock:
            now, urls = self._clock(), list(self._back)
            for step in range(len(urls)):
                url = urls[(self._next + step) % len(urls)]
                if self._back[url] <= now:
                    self._next = (self._next + step + 1) % len(urls)
                    return url
            return min(urls, key=lambda url: self._back[url])

    def eject(self, url: str) -> bool:
        """Leave a server out for a while. Returns whether it was in use until now."""
        with self._lock:
            now = self._clock()
            was_in = self._back[url] <= now
            if was_in:
                seconds = min(self.MOST_SECONDS_OUT, self.SECONDS_OUT * 2 ** self._failures[url])
                self._failures[url] += 1
                self._back[url] = now + seconds
            return was_in

    def restore(self, url: str) -> None:
        """Take a server that answered into use again, and forget its failures."""
        with self._lock:
            self._back[url] = 0.0
            self._failures[url] = 0


@dataclass
class Outage:
    """A server that does not answer: since when, the log level at which that was told, and how many requests failed."""

    since: float
    told: int = 0
    again: int = 0


class Outages:
    """Tells of each outage of a server once, and once that it is over, however many requests wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_url: dict[str, Outage] = {}
        self._ended: dict[str, float] = {}

    def failed(self, url: str, begun: float) -> None:
        """Take note that a request failed that was sent at ``begun``. One that is older than an answer says nothing."""
        with self._lock:
            if begun >= self._ended.get(url, begun):
                self._by_url.setdefault(url, Outage(begun)).again += 1

    def tell(self, url: str, level: int, message: str) -> None:
        """Log ``message`` if there is an outage of which nothing was logged at ``level`` or above."""
        with self._lock:
            outage = self._by_url.get(url)
            if outage is None or level <= outage.told:
                return
            outage.told = level
        logger.log(level, "%s; further attempts are not told", message)

    def over(self, url: str) -> None:
        """Log that a server answers again, if an outage of it was told."""
        with self._lock:
            outage, self._ended[url] = self._by_url.pop(url, None), time.monotonic()
        if outage is not None and outage.told:
            seconds = self._ended[url] - outage.since
            told = "verifier server %s answers again after %.0f s, in which %d requests failed"
            logger.log(outage.told, told, shown_url(url), seconds, outage.again)


class Counted:
    """Counts for the metrics what asking a verifier takes. Several threads may count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def count(self, name: str, by: int = 1) -> None:
        """Add ``by`` to the count ``name`` of the metrics."""
        with self._counting:
            self._counts[name] += by

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, which start again at 0."""
        with self._counting:
            taken, self._counts = self._counts, Counter()
        return {name: taken[name] for name in COUNTED}


def each_once(
    chats: Sequence[list[Message]],
    references: Sequence[str | None],
    ask: Callable[[list[list[Message]], list[str | None]], list[Outcome]],
) -> list[Outcome]:
    """Return what ``ask(chats, references)`` finds for each chat, where equal chats with equal references are asked for
    once.

    The last bits of a score depend on what is read beside a chat, and a server may even draw its scores. Equal answers
    would then earn different rewards, which rules and groups that compare answers would see.
    """
    keys = [json.dumps([chat, reference], sort_keys=True) for chat, reference in zip(chats, references, strict=True)]
    places = {key: place for place, key in reversed(list(enumerate(keys)))}
    first = sorted(places.values())
    outcomes = ask([chats[place] for place in first], [references[place] for place in first])
    by_place = dict(zip(first, outcomes, strict=True))
    return [by_place[places[key]] for key in keys]


class VerifierClient(Counted):
    """Scores chats by asking servers. It sends requests from several threads, but must be used from one at a time.

    Raises:
        ConfigError: a URL does not begin with http:// or https://, or ``api: vllm`` names no model.
    """

    def __init__(self, section: VerifierSection, urls: Sequence[str]):
        super().__init__()
        self.section = section
        self.urls = tuple(url.rstrip("/") for url in urls)
        for url in self.urls:  # the configuration's are checked already, the environment's are not
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{URLS_VARIABLE}: expected http://HOST:PORT, got {url!r}")
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._http = {url: HttpClient(url, section.timeout, token, TOKEN_VARIABLE) for url in self.urls}
        self._servers, self._outages = Servers(self.urls), Outages()
        self._ask = {"maporl": self._ask_maporl, "vllm": self._ask_vllm}[section.api]
        self._vllm = VLLM(section) if section.api == "vllm" else None
        self.identity = Identity(section.on_change)
        self._unnamed: set[str] = set()

    def scores(self, chats: Sequence[list[Message]], references: Sequence[str | None]) -> list[Outcome]:
        """A score in [0, 1] for the last message of each chat, in order. Equal chats are asked for once
        (:func:`each_once`).

        With ``on_failure: label``, a chat that no server scored has the failure in the place of its score.

        Raises:
            VerifierFailure: no server scored a chat, and ``on_failure`` is not ``label``.
            VerifierChanged: a server has another verifier than before, and ``on_change`` is ``stop``.
        """
        return each_once(chats, references, self._scores)

    def _scores(self, chats: list[list[Message]], references: list[str | None]) -> list[Outcome]:
        size = self.section.batch_size
        starts = range(0, len(chats), size)
        with Threads(min(self.section.concurrency, len(starts)), "asks a verifier") as threads:
            parts = [threads.submit(self._request, chats[i : i + size], references[i : i + size]) for i in starts]
            return [outcome for part in parts for outcome in result(part)]

    def _request(self, chats: Sequence[list[Message]], references: Sequence[str | None]) -> Sequence[Outcome]:
        """Try one request until it is answered. All tries have one id, so that a server does not score it twice."""
        request_id = uuid.uuid4().hex
        retries = None if self.section.on_failure == "wait" else self.section.retries
        try:
            return persistent(retries, self._note_retry)(self._attempt, request_id, chats, references)
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
        sleep = state.next_action.sleep if state.next_action else 0.0
        level = logging.WARNING if state.attempt_number >= self.section.retries else logging.INFO
        url = getattr(error, "url", "")
        self._outages.tell(url, level, f"{error}; attempt {state.attempt_number}, next in {sleep:.1f} s")

    def _attempt(
        self, request_id: str, chats: Sequence[list[Message]], references: Sequence[str | None]
    ) -> Sequence[Outcome]:
        url, begun = self._servers.take(), time.monotonic()
        self.count("requests")
        try:
            outcomes = self._ask(url, request_id, chats, references)
        except HttpFailure as error:
            if not error.passing:
                raise VerifierFailure(url, str(error)) from error
            self._outages.failed(url, begun)
            if not error.retry_after and self._servers.eject(url):
                self.count("ejected")
            raise Unavailable(url, str(error), error.retry_after) from error
        self._servers.restore(url)
        self._outages.over(url)
        return outcomes

    def _ask_maporl(
        self, url: str, request_id: str, chats: Sequence[list[Message]], references: Sequence[str | None]
    ) -> Sequence[Outcome]:
        body = {"request_id": request_id, "chats": list(chats), "references": list(references)}
        answer, results = self._list(url, "/v1/score", body, "results", len(chats))
        self._see(url, answer)
        return [self._outcome(url, result) for result in results]

    def _see(self, url: str, answer: dict[str, Any]) -> None:
        """Take note of the verifier that an answer is from."""
        sha256, shown = answer.get("sha256"), self._http[url].shown
        if sha256 is not None and (not isinstance(sha256, str) or not 0 < len(sha256) <= _LONGEST_DIGEST):
            raise VerifierFailure(url, f"expected sha256 of its verifier as a text, got {shown(sha256)}")
        if sha256 is None and url not in self._unnamed:
            self._unnamed.add(url)
            logger.warning(
                "verifier server %s does not say which verifier it has (sha256), so that another one goes unnoticed",
                shown_url(url),
            )
        self.identity.see(sha256, shown(answer.get("model")), f"verifier server {shown_url(url)}")

    def _outcome(self, url: str, result: Any) -> Outcome:
        """The outcome for one chat. Its error is raised, and so stops the run, unless ``on_failure`` is ``label``."""
        error = result.get("error") if isinstance(result, dict) else None
        if error is None:
            return self._score(url, result.get("score") if isinstance(result, dict) else result)
        told = f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else error
        failure = VerifierFailure(url, f"could not score an answer: {self._http[url].shown(told)}")
        if self.section.on_failure != "label":
            raise failure
        return failure

    def _ask_vllm(
        self, url: str, request_id: str, chats: Sequence[list[Message]], references: Sequence[str | None]
    ) -> Sequence[Outcome]:
        assert self._vllm is not None  # made for this interface
        _, items = self._list(url, "/classify", self._vllm.body(request_id, chats), "data", len(chats))
        by_index = {
            item["index"]: item.get("probs")
            for item in items
            if isinstance(item, dict) and type(item.get("index")) is int
        }
        missing = [index for index in range(len(chats)) if index not in by_index]
        if missing:
            raise VerifierFailure(url, f"expected data on the inputs 0 to {len(chats) - 1}, got none on {missing[0]}")
        return [self._calibrated(url, by_index[index]) for index in range(len(chats))]

    def _calibrated(self, url: str, probabilities: Any) -> float:
        assert self._vllm is not None  # made for this interface
        if not isinstance(probabilities, list) or len(probabilities) not in (1, 2):
            got = self._http[url].shown(probabilities)
            raise VerifierFailure(url, f"expected probabilities of one class or two, got {got}")
        return self._vllm.calibrate(self._score(url, probabilities[-1]))

    def _list(
        self, url: str, path: str, body: dict[str, Any], name: str, count: int
    ) -> tuple[dict[str, Any], list[Any]]:
        """Post ``body`` and return the answer, and its list ``name``, which has ``count`` entries."""
        answer: Any = self._http[url].post(path, body)
        if not isinstance(answer, dict):
            raise VerifierFailure(url, f"expected a JSON object, got {type(answer).__name__}")
        entries = answer.get(name)
        if not isinstance(entries, list) or len(entries) != count:
            got = len(entries) if isinstance(entries, list) else self._http[url].shown(answer.get(name, answer))
            raise VerifierFailure(url, f"expected {count} {name}, got {got}")
        return answer, entries

    def _score(self, url: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise VerifierFailure(url, f"expected a score in [0, 1], got {self._http[url].shown(value)}")
        return float(value)


class VLLM:
    """The requests to ``vllm serve DIR --runner pooling``, which takes token ids and answers with probabilities.

    ``reward.verifier.model`` names the folder, whose tokenizer and temperature are used here. vLLM must serve the model
    under that name.

    Raises:
        ConfigError: ``reward.verifier`` names no model, or its tokenizer cannot be read.
        VerifierError: the folder's record is damaged.
    """

    def __init__(self, section: VerifierSection):
        from transformers import AutoTokenizer

        from trl_ext.models.weights import WeightsError, read_pretrained

        if section.model is None:
            raise ConfigError("reward.verifier: api vllm needs 'model', whose tokenizer encodes the chats; add it")
        self.model = section.model
        try:
            self.tokenizer = read_pretrained(AutoTokenizer, section.model)
        except WeightsError as error:
            raise ConfigError(f"reward.verifier.model: {error}; its tokenizer encodes the chats") from error
        self.temperature = temperature_of(read_record(section.model))

    def body(self, request_id: str, chats: Sequence[list[Message]]) -> dict[str, Any]:
        """The body of a request for the scores of ``chats``."""
        return {"model": self.model, "request_id": request_id, "input": [encode(self.tokenizer, c) for c in chats]}

    def calibrate(self, p: float) -> float:
        """Return the probability that an answer is right, after the temperature, from the server's ``p``."""
        if self.temperature == 1.0 or p in (0.0, 1.0):
            return p
        return 1 / (1 + math.exp(-math.log(p / (1 - p)) / self.temperature))
