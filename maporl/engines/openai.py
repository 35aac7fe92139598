"""An engine for agents behind an OpenAI-compatible API. They are never trained.

A vendor, vLLM or ``transformers serve`` may provide the API. Answers that were paid for are kept at once, so that a run
that fails and goes on does not pay for them again.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from maporl.config.schema import ApiSection
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.errors import ConfigError, UserError
from maporl.http_client import HttpClient, HttpFailure, persistent
from maporl.storage.disk_cache import DiskCache, cache_folder
from maporl.text import well_formed
from maporl.types import Stop
from trl_ext.ppo_options import Decoding

VENDOR = "https://api.openai.com/v1"
"""The address of agents without ``base_url``, unless ``$OPENAI_BASE_URL`` has another."""
MOST_CHARACTERS = 200
"""The most characters of an answer for each token that it may have. The longest tokens are runs of 128 spaces."""
_COUNTED = ("prompt_tokens", "completion_tokens")
_CUT = ("length", "content_filter")
"""Why an answer without text may be whole: its tokens ended before it began, or a filter has removed it."""


class ApiFailure(UserError, RuntimeError):
    """An endpoint gave no answer after all retries. The message names the agent, the endpoint and the model."""


class OpenAIEngine(Engine):
    """Sends each agent's conversation to its API, and again where that may help.

    ``counts`` has the number of requests, of answers from the cache, and of tokens, for each agent.

    Args:
        sections: the API options of each agent.
        max_new_tokens: the longest answer, unless an agent's section sets another length.
        stop_strings: the strings at which an answer ends. An API leaves them out of the answer. The strings that
            complete a call are not sent: the answer is cut after the first of them.

    Raises:
        ConfigError: an API key is missing, or an address is not one.
    """

    remote = True
    between = True

    def __init__(self, sections: Mapping[str, ApiSection], max_new_tokens: int, stop_strings: Sequence[str] = ()):
        self.sections, self.max_new_tokens, self.stop_strings = dict(sections), max_new_tokens, list(stop_strings)
        self.counts: dict[str, float] = {}
        self._clients = {name: client_of(name, section) for name, section in self.sections.items()}
        self._cache: DiskCache | None = None
        if any(section.cache for section in self.sections.values()):
            self._cache = DiskCache(cache_folder(), "api", is_whole)

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order. At most ``concurrency`` requests run at a time.

        Raises:
            ApiFailure: an endpoint gave no answer after all retries. The answers to other requests are kept.
        """
        queries = [self._query(request, decoding) for request in requests]
        keys = [_key(query, request.label) for query, request in zip(queries, requests, strict=True)]
        wanted = [key for key, r in zip(keys, requests, strict=True) if self.sections[r.ask.agent].cache]
        known = self._cache.get(wanted) if self._cache is not None and wanted else {}
        missing = [i for i, key in enumerate(keys) if key not in known]
        with ThreadPoolExecutor(max((s.concurrency for s in self.sections.values()), default=1)) as pool:
            asked = [pool.submit(self._ask, requests[i], queries[i], keys[i]) for i in missing]
            try:
                fresh = {i: answer.result() for i, answer in zip(missing, asked, strict=True)}
            except BaseException:  # requests under way are answered and kept, the others are not sent
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [self._reply(request, fresh.get(i) or known[keys[i]], i in fresh) for i, request in enumerate(requests)]

    def metrics(self) -> dict[str, float]:
        """Return the counts so far: ``api/AGENT/requests``, ``cached``, ``prompt_tokens`` and ``completion_tokens``."""
        return dict(self.counts)

    def _query(self, request: Request, decoding: Decoding) -> dict[str, Any]:
        section, drawn = self.sections[request.ask.agent], request.drawn(decoding)
        own = None if request.sampling is None else request.sampling.stop
        # an API leaves a stop string out, and some refuse them; where a call ends is found in the answer
        stop = [s for s in (self.stop_strings if own is None else own) if s not in request.call_ends]
        return {
            "model": section.model,
            "messages": list(request.transcript.messages),
            "temperature": drawn.temperature if section.temperature is None else section.temperature,
            "max_tokens": section.max_tokens or request.longest(self.max_new_tokens),
            "base_url": section.base_url,
            **({"top_p": drawn.top_p} if drawn.top_p < 1 else {}),
            **({"stop": stop} if stop else {}),
        }

    def _ask(self, request: Request, query: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the record of the answer, which the cache has by now if the agent's answers are cached."""
        name = request.ask.agent
        section, client = self.sections[name], self._clients[name]
        sent = {option: value for option, value in query.items() if option != "base_url"}
        read = reader(client, query["max_tokens"])
        try:
            record = persistent(section.retries)(client.post, "/chat/completions", sent, read)
        except HttpFailure as error:
            raise ApiFailure(
                f"{request.label}: no answer from {client.url} (model {query['model']!r}, up to {section.retries} retries): "
                f"{error}"
            ) from error
        if self._cache is not None and section.cache and is_whole(record):
            self._cache.put([(key, record)])
        return record

    def _reply(self, request: Request, record: dict[str, Any], fresh: bool) -> Reply:
        def count(what: str, by: float) -> None:
            name = f"api/{request.ask.agent}/{what}"
            self.counts[name] = self.counts.get(name, 0.0) + by

        count("requests", float(fresh))
        count("cached", float(not fresh))
        for what in _COUNTED:
            count(what, record[what] if fresh else 0)
        stop = {"length": Stop.LENGTH, "content_filter": Stop.FILTERED}.get(record["stop"], Stop.EOS)
        text, called = up_to_call(well_formed(record["text"]), request.call_ends)
        return Reply(text.strip(), Stop.STOP if called else stop)


def up_to_call(text: str, call_ends: Sequence[str]) -> tuple[str, bool]:
    """Return ``text`` up to the end of its first call, and whether it has one.

    A model that does not stop there goes on with results that it has made up.
    """
    ends = [place + len(end) for end in call_ends if (place := text.find(end)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def client_of(name: str, section: ApiSection) -> HttpClient:
    """Return the API client of agent ``name``.

    Raises:
        ConfigError: the API key is missing, or it or the address cannot be used.
    """
    key = os.environ.get(section.key_variable)
    if key is None and section.base_url is None:
        raise ConfigError(
            f"agents.{name}.api: the environment variable {section.key_variable} holds no key; set it, or give base_url of a "
            "server that needs none"
        )
    url = section.base_url or os.environ.get("OPENAI_BASE_URL") or VENDOR
    try:
        return HttpClient(url, section.timeout, key or "", section.key_variable)
    except ConfigError as error:
        raise ConfigError(f"agents.{name}.api: {error}") from None


def reader(client: HttpClient, max_tokens: int) -> Callable[[Any], dict[str, Any]]:
    """Return what reads the JSON value of an answer: as a record with its text, its stop and its numbers of tokens.

    It raises an HttpFailure for an answer that is broken. Another try may bring a whole one.
    """

    def read(found: Any) -> dict[str, Any]:
        try:
            choice, usage = found["choices"][0], found.get("usage")
            text, stop = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, TypeError, IndexError, AttributeError):
            raise HttpFailure(f"answered without choices[0].message.content: {client.shown(found)}", True) from None
        if text is None and stop in _CUT:
            text = ""
        named = stop is None or (isinstance(stop, str) and len(stop) < 40 and stop != "error")
        if not isinstance(text, str) or not named or found.get("error"):
            raise HttpFailure(f"answered with a broken choice: {client.shown(found)}", passing=True)
        if len(text) > MOST_CHARACTERS * max_tokens:
            raise HttpFailure(f"answered with {len(text):,} characters, and {max_tokens} tokens were asked for", True)
        usage = usage if isinstance(usage, dict) else {}
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # no tokenizer reads half a character
        return {"text": text, "stop": stop, **{name: _count(usage.get(name)) for name in _COUNTED}}

    return read


def _count(number: Any) -> int:
    """Return a server's number of tokens, or 0 if it gives none that can be true."""
    return number if type(number) is int and 0 <= number < 2**40 else 0


def is_whole(record: dict[str, Any]) -> bool:
    """Return whether ``record`` is a whole answer. The cache keeps no other, and reads no other."""
    text, stop = record.get("text"), record.get("stop")
    counted = all(_count(record.get(name)) == record.get(name) for name in _COUNTED)
    return isinstance(text, str) and isinstance(stop, str) and bool(text or stop in _CUT) and counted


def _key(query: dict[str, Any], label: str) -> str:
    """Return the cache key of a query. It includes the label, so other dialogues ask again."""
    return hashlib.sha256(json.dumps([query, label], sort_keys=True).encode()).hexdigest()


def build(setup: EngineSetup) -> OpenAIEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names."""
    return OpenAIEngine(setup.options, setup.sampling.response_length, setup.sampling.stop_strings or ())
