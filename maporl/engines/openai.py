"""An engine for agents behind an OpenAI-compatible API. They are never trained.

A vendor, vLLM or ``transformers serve`` may provide the API. Answers that were paid for are kept at once, so that a run
that fails and goes on does not pay for them again.

An endpoint may answer without text: a filter removed it, the model refused, or all tokens went into its thinking. The
utterance is then empty, or has the words of the refusal, and its tag ``no_text`` says why.
"""

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import RetryCallState

from maporl.config.schema import ApiSection
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.environments.calls import before_calls
from maporl.errors import ConfigError, UserError
from maporl.http_client import HttpClient, HttpFailure, persistent
from maporl.storage.disk_cache import DiskCache, cache_folder
from maporl.text import well_formed
from maporl.types import Stop
from trl_ext.errors import retold
from trl_ext.ppo.options import Decoding
from trl_ext.process.waits import Threads, finished, result

logger = logging.getLogger(__name__)

VENDOR = "https://api.openai.com/v1"
"""The address of agents without ``base_url``, unless ``$OPENAI_BASE_URL`` has another."""
MOST_CHARACTERS = 200
"""The most characters of an answer for each token that it may have. The longest tokens are runs of 128 spaces."""
_COUNTED = ("prompt_tokens", "completion_tokens")
_CUT = (Stop.LENGTH, Stop.FILTERED)
"""Why an answer without text may be whole: its tokens ended before it began, or a filter has removed it."""
_THINKING = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
"""The fields in which servers return what a model thought before its answer."""
_FIELDS = {
    "max_tokens": r"\bmax_tokens\b",
    "temperature": r"\btemperature\b",
    "top_p": r"\btop_p\b",
    "stop": r"['\"`]stop['\"`]",
    "seed": r"\bseed\b",
}
"""The fields that some models refuse, and how messages name them."""
_VALUE = re.compile(
    r"between|range|at (?:most|least)|(?:less|greater|larger|smaller|lower|higher|more) than|too (?:large|big|high|small|low|long)"  # noqa: E501
    r"|exceed|<=|>=|maximum|minimum|context",
    re.IGNORECASE,
)
"""What messages say that refuse a value, and not the field."""


class ApiFailure(UserError, RuntimeError):
    """An endpoint gave no answer after all retries. The message names the agent, the endpoint and the model."""


class NotWhole(HttpFailure):
    """A server has broken off an answer, or does not say that it has ended. It is asked for again."""


class OpenAIEngine(Engine):
    """Sends each agent's conversation to its API, and again where that may help.

    ``counts`` has the number of requests, of answers from the cache, of answers without text, of answers that were
    broken off and asked for again, and of tokens, for each agent.

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
        self._refused: dict[tuple[str, str], frozenset[str]] = {}
        """The fields that a model at an address has refused."""
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
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
        cached = self._cache.get(wanted) if self._cache is not None and wanted else {}
        missing = [i for i, key in enumerate(keys) if key not in cached]
        with Threads(max((s.concurrency for s in self.sections.values()), default=1), "asks an API") as threads:
            asked = [threads.submit(self._ask, requests[i], queries[i], keys[i]) for i in missing]
            try:
                fresh = {i: result(answer) for i, answer in zip(missing, asked, strict=True)}
            except Exception:  # requests under way are answered and kept, the others are not sent
                finished([answer for answer in asked if not answer.cancel()])
                raise
        return [self._reply(request, fresh.get(i) or cached[keys[i]], i in fresh) for i, request in enumerate(requests)]

    def metrics(self) -> dict[str, float]:
        """Return the counts so far: ``api/AGENT/requests``, ``cached``, ``no_text``, ``not_whole``,
        ``prompt_tokens``, ``completion_tokens``."""
        return dict(self.counts)

    def _add(self, name: str, what: str, by: float) -> None:
        with self._lock:
            self.counts[f"api/{name}/{what}"] = self.counts.get(f"api/{name}/{what}", 0.0) + by

    def _query(self, request: Request, decoding: Decoding) -> dict[str, Any]:
        section, drawn = self.sections[request.ask.agent], request.drawn(decoding)
        # an API leaves a stop string out, and some refuse them; where a call ends is found in the answer
        stop = [s for s in request.settings.get("stop", self.stop_strings) if s not in request.call_ends]
        return {
            "model": section.model,
            "messages": list(request.transcript.messages),
            "temperature": drawn.temperature if section.temperature is None else section.temperature,
            "max_tokens": section.max_tokens or request.longest(self.max_new_tokens),
            "base_url": section.base_url,
            **({"top_p": drawn.top_p} if drawn.top_p < 1 else {}),
            **({"stop": stop} if stop else {}),
            **({"response_format": form.response_format} if (form := request.structured_output) else {}),
            **({"seed": request.ask.seed[0]} if request.ask.seed else {}),
        }

    def _ask(self, request: Request, query: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the record of the answer, which the cache has by now if the agent's answers are cached."""
        name = request.ask.agent
        section, client = self.sections[name], self._clients[name]
        read = reader(client, query["max_tokens"])

        def note(state: RetryCallState) -> None:
            self._add(name, "not_whole", isinstance(state.outcome and state.outcome.exception(), NotWhole))

        record = None
        while record is None:
            left_out = self._left_out(name)
            try:
                body = _body(query, left_out)
                record = persistent(section.retries, note)(client.post, "/chat/completions", body, read)
            except HttpFailure as error:
                refusal = refusal_of(error)
                if refusal.code == "content_filter":  # the filter has read the prompt
                    record = {"text": "", "stop": refusal.code, "no_text": refusal.code, **dict.fromkeys(_COUNTED, 0)}
                elif refusal.field is None or not self._learn(name, refusal.field, left_out, error):
                    raise ApiFailure(
                        f"{request.label}: no answer from {client.url} (model {query['model']!r}, up to "
                        f"{section.retries} retries): {error}"
                    ) from error
        if "stop" in left_out:
            record["text"] = up_to(record["text"], query.get("stop", ()))
        if self._cache is not None and section.cache and is_whole(record):
            self._cache.put([(key, record)])
        return record

    def _left_out(self, name: str) -> frozenset[str]:
        """Return the fields of :data:`_FIELDS` that an agent's requests do not have."""
        section = self.sections[name]
        renamed = ["max_tokens"] if section.length_field == "max_completion_tokens" else []
        return self._refused.get((self._clients[name].url, section.model), frozenset()).union(
            section.leave_out, renamed
        )

    def _learn(self, name: str, field: str, left_out: frozenset[str], error: HttpFailure) -> bool:
        """Send no more of a refused field. Return False if this was so already, or the configuration wants it."""
        section, url = self.sections[name], self._clients[name].url
        if field in left_out or (field == "max_tokens" and section.length_field == "max_tokens"):
            return False
        with self._lock:
            refused = self._refused.get((url, section.model), frozenset())
            self._refused[url, section.model] = refused | {field}
        if field not in refused:
            now, option = {
                "max_tokens": ("max_completion_tokens is sent in its place", "length_field: max_completion_tokens"),
                "stop": ("answers are cut at stop strings here", "leave_out: [stop]"),
            }.get(field, (f"answers have the server's own {field}", f"leave_out: [{field}]"))
            logger.warning(
                "agents.%s.api: %s: model %r refuses %s (%s); from now on %s. Set api.%s to say so from the beginning",
                name, url, section.model, field, error, now, option,
            )  # fmt: skip
        return True

    def _tell(self, name: str, why: str) -> None:
        """Say once for each agent and reason that an answer had no text."""
        with self._lock:
            if (name, why) in self._told:
                return
            self._told.add((name, why))
        logger.warning(
            "agents.%s.api: %s answered without text (%s). Such an answer is %s; its utterance has the tag no_text, "
            "and api/%s/no_text counts them",
            name, self._clients[name].url, why, "the words of the refusal" if why == "refusal" else "empty", name,
        )  # fmt: skip

    def _reply(self, request: Request, record: dict[str, Any], fresh: bool) -> Reply:
        def count(what: str, by: float) -> None:
            self._add(request.ask.agent, what, by)

        count("requests", float(fresh))
        count("cached", float(not fresh))
        for what in _COUNTED:
            count(what, record[what] if fresh else 0)
        no_text = record.get("no_text")
        count("no_text", float(no_text is not None))
        count("not_whole", 0.0)  # it was counted when it was asked for again
        if no_text is not None:
            self._tell(request.ask.agent, no_text)
        stop = Stop.of(record["stop"])
        assert stop is not None  # no other answer is read or kept
        if no_text == "refusal":
            stop = Stop.FILTERED
        several = bool(request.ask.schemas) and not request.ask.single
        text, called = up_to_call(well_formed(record["text"]), request.call_ends, several)
        usage = [record[what] for what in _COUNTED]
        return Reply(text.strip(), Stop.STOP if called else stop, no_text=no_text, usage=usage if any(usage) else None)


def _body(query: dict[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """Return what is sent for a query, without the fields that the model refuses."""
    body = {field: value for field, value in query.items() if field != "base_url" and field not in left_out}
    return body if "max_tokens" in body else {**body, "max_completion_tokens": query["max_tokens"]}


def up_to(text: str, stop_strings: Sequence[str]) -> str:
    """Return ``text`` up to the first of the stop strings, and without it, as an API returns it.

    >>> up_to("4; 5. 6", [".", ";"]), up_to("4", ["."])
    ('4', '4')
    """
    return text[: min((place for string in stop_strings if (place := text.find(string)) >= 0), default=len(text))]


def up_to_call(text: str, call_ends: Sequence[str], several: bool = False) -> tuple[str, bool]:
    """Return ``text`` up to the end of its first call, and whether it has one.

    A model that does not stop there goes on with results that it has made up. ``several``: calls right after the first
    belong to it.

    >>> up_to_call("I add <a>1</a> <a>2</a> It is 3 <a>4</a>", ["</a>"], several=True)
    ('I add <a>1</a> <a>2</a>', True)
    """
    place = 0
    while ends := [start + len(end) for end in call_ends if (start := text.find(end, place)) >= 0]:
        if place and (not several or before_calls(text[place : min(ends)])):
            break
        place = min(ends)
    return (text[:place], True) if place else (text, False)


def client_of(name: str, section: ApiSection) -> HttpClient:
    """Return the API client of agent ``name``.

    Raises:
        ConfigError: the API key is missing, or it or the address cannot be used.
    """
    url = endpoint_of(name, section)
    with retold(ConfigError, lambda error: ConfigError(f"agents.{name}.api: {error}")):
        return HttpClient(url, section.timeout, os.environ.get(section.key_variable, ""), section.key_variable)


def endpoint_of(name: str, section: ApiSection) -> str:
    """Return the address of agent ``name``'s API.

    Raises:
        ConfigError: the address is that of a vendor, and the environment has no key for it.
    """
    if section.base_url is None and not os.environ.get(section.key_variable, "").strip():
        raise ConfigError(f"agents.{name}.api: {section.key_variable} holds no key; set it, or another base_url")
    return section.base_url or os.environ.get("OPENAI_BASE_URL") or VENDOR


@dataclass(frozen=True)
class Refusal:
    """What an endpoint refused: the ``field`` of :data:`_FIELDS` that its model does not take, and the error's
    ``code``."""

    field: str | None = None
    code: str | None = None


def refusal_of(error: HttpFailure) -> Refusal:
    """Return what a failed request was refused for, as far as the answer names it.

    A message that names a field because of its value, such as a length beyond the context, refuses no field.
    """
    if error.status not in (400, 422):
        return Refusal()
    try:
        answer = json.loads(error.content)
    except (ValueError, RecursionError):
        answer = error.content.decode("utf-8", "replace")
    answer = answer[0] if isinstance(answer, list) and answer else answer
    answer = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    told = answer if isinstance(answer, Mapping) else {"message": answer}
    code, field = (told.get(name) if isinstance(told.get(name), str) else None for name in ("code", "param"))
    words = _words(told.get("message")) or _words(told.get("detail"))
    if _VALUE.search(words) or (field and field not in _FIELDS):
        return Refusal(code=code)
    return Refusal(field or next((name for name, form in _FIELDS.items() if re.search(form, words)), None), code)


def _words(message: Any) -> str:
    """Return the text of an error: a text, or pydantic's list of faults, each with its place, or ``detail``."""
    if isinstance(message, Mapping):
        message = message.get("detail")
    if isinstance(message, str):
        return message[:4000]
    if not isinstance(message, list):
        return ""
    faults = [fault for fault in message[:20] if isinstance(fault, Mapping)]
    places = [fault["loc"][-1] if isinstance(fault.get("loc"), list) and fault["loc"] else "" for fault in faults]
    return "; ".join(f"'{place}' {fault.get('msg', '')}" for place, fault in zip(places, faults, strict=True))[:4000]


def reader(client: HttpClient, max_tokens: int) -> Callable[[Any], dict[str, Any]]:
    """Return what reads the JSON value of an answer.

    It is read as a record with its text, its stop, its numbers of tokens and, in ``no_text``, why it lacks a text, or
    None. An answer that is broken raises an HttpFailure. Another try may bring a whole one.
    """

    def read(answer: Any) -> dict[str, Any]:
        try:
            choice, usage = answer["choices"][0], answer.get("usage")
            stop = choice.get("finish_reason")
            if Stop.of(stop) is None:
                raise NotWhole(f"answered with a choice that is not whole: finish_reason {client.shown(stop)}", True)
            stop = stop.lower()
            text, no_text = _said(choice.get("message"), stop)
        except (KeyError, TypeError, IndexError, AttributeError):
            raise HttpFailure(f"answered without choices[0].message.content: {client.shown(answer)}", True) from None
        if not isinstance(text, str) or answer.get("error"):
            raise HttpFailure(f"answered with a broken choice: {client.shown(answer)}", passing=True)
        if len(text) > MOST_CHARACTERS * max_tokens:
            raise HttpFailure(f"answered with {len(text):,} characters, and {max_tokens} tokens were asked for", True)
        usage = usage if isinstance(usage, dict) else {}
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # no tokenizer reads half a character
        counted = {name: _count(usage.get(name)) for name in _COUNTED}
        return {"text": text, "stop": stop, "no_text": no_text, **counted}

    return read


def _said(message: Any, stop: str) -> tuple[Any, str | None]:
    """Return the text of a message, or what stands in its place, and why it has no text, if so."""
    # servers give no text in many forms: no message at all for what a filter removed, no content or null beside the
    # words of a refusal or of the model's thinking, an empty text, or a list of parts of other types
    if message is None and Stop.of(stop) in _CUT:
        message = {}
    if not isinstance(message, Mapping):
        raise TypeError("no message")
    content, refusal = message.get("content"), message.get("refusal")
    thought = any(message.get(field) for field in _THINKING)
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {"type": "text", "text": part} for part in content]
        content = "".join(part["text"] for part in parts if part.get("type") in ("text", "output_text"))
        refusal = refusal or "".join(part["refusal"] for part in parts if part.get("type") == "refusal")
        thought = thought or any(part.get("type") in ("thinking", "redacted_thinking", "reasoning") for part in parts)
    if content:
        return content, None
    reasons = {
        "refusal": isinstance(refusal, str) and bool(refusal),
        stop: Stop.of(stop) in _CUT,
        "thinking": thought,
        "tool_calls": bool(message.get("tool_calls") or message.get("function_call")),
        "empty": content is not None or "content" not in message,
    }
    why = next((reason for reason, applies in reasons.items() if applies), None)
    if why is None or not isinstance(content, str | None):
        return content, None  # null without a reason does not count as an answer
    return (refusal if why == "refusal" else ""), why


def _count(number: Any) -> int:
    """Return a server's number of tokens, or 0 if it gives none that can be true."""
    return number if type(number) is int and 0 <= number < 2**40 else 0


def is_whole(record: dict[str, Any]) -> bool:
    """Return whether ``record`` is a whole answer. The cache keeps no other, and reads no other."""
    text, stop, no_text = record.get("text"), record.get("stop"), record.get("no_text")
    counted = all(_count(record.get(name)) == record.get(name) for name in _COUNTED)
    why = no_text if isinstance(no_text, str) and no_text != "empty" else None
    ended = Stop.of(stop)
    return isinstance(text, str) and ended is not None and bool(text or why or ended in _CUT) and counted


def _key(query: dict[str, Any], label: str) -> str:
    """Return the cache key of a query. It includes the label, so other dialogues ask again."""
    return hashlib.sha256(json.dumps([query, label], sort_keys=True).encode()).hexdigest()


def build(setup: EngineSetup) -> OpenAIEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names."""
    return OpenAIEngine(setup.options, setup.sampling.response_length, setup.sampling.stop_strings or ())
