"""An engine for agents behind an OpenAI-compatible API. They are never trained.

A vendor, vLLM or ``transformers serve`` may provide the API.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from maporl.config.schema import ApiSection
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.errors import ConfigError, UserError
from maporl.storage.disk_cache import DiskCache, cache_folder
from maporl.text import well_formed
from maporl.types import Stop
from trl_ext.ppo_options import Decoding


class ApiFailure(UserError, RuntimeError):
    """An endpoint gave no answer after all retries. The message names the agent, the endpoint and the model."""


class OpenAIEngine(Engine):
    """Sends each agent's conversation to its API. The client of package ``openai`` retries failed requests.

    ``counts`` has the number of requests, of answers from the cache, and of tokens, for each agent.

    Args:
        sections: the API options of each agent.
        max_new_tokens: the longest answer, unless an agent's section sets another length.

    Raises:
        ConfigError: the package ``openai`` or an API key is missing.
    """

    remote = True

    def __init__(self, sections: Mapping[str, ApiSection], max_new_tokens: int):
        self.sections, self.max_new_tokens = dict(sections), max_new_tokens
        self.counts: dict[str, float] = {}
        self._clients = {name: client_of(name, section) for name, section in self.sections.items()}
        self._cache: DiskCache | None = None
        if any(section.cache for section in self.sections.values()):
            self._cache = DiskCache(cache_folder(), "api")

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order. At most ``concurrency`` requests run at a time.

        Raises:
            ApiFailure: an endpoint gave no answer after all retries.
        """
        queries = [self._query(request, decoding) for request in requests]
        keys = [_key(query, request.label) for query, request in zip(queries, requests, strict=True)]
        cached = [self.sections[r.ask.agent].cache for r in requests]
        wanted = [key for key, keep in zip(keys, cached, strict=True) if keep]
        known = self._cache.get(wanted) if self._cache is not None and wanted else {}
        missing = [i for i, key in enumerate(keys) if key not in known]
        with ThreadPoolExecutor(max((s.concurrency for s in self.sections.values()), default=1)) as pool:
            fresh = dict(zip(missing, pool.map(lambda i: self._ask(requests[i], queries[i]), missing), strict=True))
        if self._cache is not None:
            self._cache.put((keys[i], record) for i, record in fresh.items() if cached[i])
        return [self._reply(request, fresh.get(i) or known[keys[i]], i in fresh) for i, request in enumerate(requests)]

    def metrics(self) -> dict[str, float]:
        """Return the counts so far: ``api/AGENT/requests``, ``cached``, ``prompt_tokens`` and ``completion_tokens``."""
        return dict(self.counts)

    def _query(self, request: Request, decoding: Decoding) -> dict[str, Any]:
        section = self.sections[request.ask.agent]
        return {
            "model": section.model,
            "messages": list(request.transcript.messages),
            "temperature": decoding.temperature if section.temperature is None else section.temperature,
            "max_tokens": section.max_tokens or self.max_new_tokens,
            "base_url": section.base_url,
            **({"top_p": decoding.top_p} if decoding.top_p < 1 else {}),
        }

    def _ask(self, request: Request, query: dict[str, Any]) -> dict[str, Any]:
        import openai

        name = request.ask.agent
        sent = {key: value for key, value in query.items() if key != "base_url"}
        try:
            answer = self._clients[name].chat.completions.create(**sent)
        except openai.OpenAIError as error:
            raise ApiFailure(
                f"{request.label}: no answer from {self._clients[name].base_url} (model {query['model']!r}) after "
                f"{self.sections[name].retries} retries: {type(error).__name__}: {error}"
            ) from error
        choice, usage = answer.choices[0], answer.usage
        return {
            "text": choice.message.content or "",
            "stop": choice.finish_reason or "stop",
            "prompt_tokens": usage.prompt_tokens if usage else 0,
            "completion_tokens": usage.completion_tokens if usage else 0,
        }

    def _reply(self, request: Request, record: dict[str, Any], fresh: bool) -> Reply:
        def count(what: str, by: float) -> None:
            name = f"api/{request.ask.agent}/{what}"
            self.counts[name] = self.counts.get(name, 0.0) + by

        count("requests", float(fresh))
        count("cached", float(not fresh))
        for what in ("prompt_tokens", "completion_tokens"):
            count(what, record[what] if fresh else 0)
        stop = {"length": Stop.LENGTH, "content_filter": Stop.FILTERED}.get(record["stop"], Stop.EOS)
        return Reply(well_formed(record["text"]).strip(), stop)


def client_of(name: str, section: ApiSection) -> Any:
    """Return the API client of agent ``name``.

    Raises:
        ConfigError: the package ``openai`` or the API key is missing.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            f"agents.{name}.engine: openai needs the package openai; install it with: pip install 'maporl[api]'"
        ) from error
    key = os.environ.get(section.key_variable)
    if key is None and section.base_url is None:
        raise ConfigError(
            f"agents.{name}.api: the environment variable {section.key_variable} holds no key; set it, or give base_url of a "
            "server that needs none"
        )
    return openai.OpenAI(
        api_key=key or "none", base_url=section.base_url, timeout=section.timeout, max_retries=section.retries
    )


def _key(query: dict[str, Any], label: str) -> str:
    """Return the cache key of a query. It includes the label, so other dialogues ask again."""
    return hashlib.sha256(json.dumps([query, label], sort_keys=True).encode()).hexdigest()


def build(setup: EngineSetup) -> OpenAIEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names."""
    return OpenAIEngine(setup.options, setup.sampling.response_length)
