"""The client of one ``vllm serve``, and the interface that the engine needs of any vLLM."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from maporl.errors import UserError
from maporl.http_client import HttpClient, HttpFailure, persistent
from maporl.integrations.vllm.section import VLLMSection
from maporl.types import Stop
from trl_ext.ppo.options import Grammar
from trl_ext.process.random_states import number_of
from trl_ext.process.waits import Threads
from trl_ext.sampling.engine import TokenEngine
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

OLDEST = (0, 14)
"""The oldest vLLM whose completions return token ids for prompts that are token ids; 0.32.0 is tested."""

WHOLE = (Stop.EOS, Stop.LENGTH)
"""Why vLLM ends a whole completion. One that ended otherwise, such as by ``abort``, says nothing about the policy."""

Answered = TypeVar("Answered")


class VLLMFailure(UserError, RuntimeError):
    """A vLLM server gave no answer, or is not what the configuration needs. The message names the server."""


class Server(TokenEngine):
    """Where vLLM runs: at a URL, or in this process. To a server, the policy of a request is the name of a model or
    adapter that it has."""

    url: str

    @property
    def base(self) -> str:
        """Return the server's name of the base model."""
        raise NotImplementedError

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""
        raise NotImplementedError

    def load(self, name: str, folder: Path, what: str) -> None:
        """Load the adapter in ``folder`` as ``name``. The folder may be removed afterwards.

        ``what`` describes the request in errors.
        """
        raise NotImplementedError

    def unload(self, name: str, what: str) -> None:
        """Remove the adapter ``name``. ``what`` describes the request in errors."""
        raise NotImplementedError


class RemoteServer(Server):
    """One ``vllm serve`` at a URL. Failed requests are sent again where that may help.

    Args:
        url: the server's address, such as ``http://127.0.0.1:8000``.
        section: the options of the policy that uses the server first.

    Raises:
        ConfigError: the address, or the key in ``section.key_variable``, cannot be used.
    """

    def __init__(self, url: str, section: VLLMSection):
        key = os.environ.get(section.key_variable, "")
        self._client = HttpClient(url, section.timeout, key, section.key_variable)
        self.url, self.section = self._client.url, section
        self._base: str | None = None
        self._pool = Threads(section.concurrency, "asks vLLM")
        self._running: dict[int, list[Future[Sampled]]] = {}

    @property
    def base(self) -> str:
        """Return the server's name of the base model. The first call also checks the version of vLLM.

        Raises:
            VLLMFailure: the server does not answer, is too old, or does not serve the configured base model.
        """
        if self._base is None:
            version = str(self._call("asking for its version", self._client.get, "/version", _version))
            parts = [int(p) for p in version.split("+")[0].split(".")[:2] if p.isdecimal()]
            if len(parts) == 2 and tuple(parts) < OLDEST:
                raise VLLMFailure(f"{self.url}: is vLLM {version}, and {'.'.join(map(str, OLDEST))} or newer is needed")
            bases = self._call("asking for its models", self._client.get, "/v1/models", _bases)
            wanted = self.section.base
            if not bases or (wanted is not None and wanted not in bases):
                raise VLLMFailure(f"{self.url}: serves {bases}, and agents.NAME.vllm.base is {wanted!r}")
            self._base = wanted or bases[0]
        return self._base

    def submit(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled]]:
        """Begin to sample one completion for each request. At most ``concurrency`` requests run at a time.

        A future raises a VLLMFailure if the server gave no answer, or an answer without token ids.
        """
        futures = [self._pool.submit(self._complete, request) for request in requests]
        left = [one for one in self._running.get(threading.get_ident(), ()) if not one.done()]
        self._running[threading.get_ident()] = left + futures
        return futures

    def release(self) -> None:
        """Send no more of this thread's requests. Those that were sent are answered, and nobody reads the answers."""
        for one in self._running.pop(threading.get_ident(), ()):
            one.cancel()

    def _complete(self, request: TokenRequest) -> Sampled:
        draw, seed = request.draw, seed_of(request)
        body = {
            "model": request.policy,
            "prompt": request.prompt_ids,
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(draw.stop_ids),
            "ignore_eos": True,
            **({"stop": list(draw.stop), "include_stop_str_in_output": True} if draw.stop else {}),
            **({} if seed is None else {"seed": seed}),
            **({} if draw.grammar is None else {"structured_outputs": held_to(draw.grammar)}),
        }
        what, read = f"{request.label}, model {request.policy!r}", lambda answer: _sampled(answer, draw.max_tokens)
        return self._call(what, self._client.post, "/v1/completions", body, read)

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of ``text`` by the server's tokenizer, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._call("tokenising", self._client.post, "/tokenize", body, lambda answer: _ids(answer["tokens"]))

    def load(self, name: str, folder: Path, what: str) -> None:
        """Let the server load the adapter in ``folder`` as ``name``. ``what`` describes the request in errors."""
        self._call(what, self._client.tell, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str, what: str) -> None:
        """Let the server remove the adapter ``name``. ``what`` describes the request in errors."""
        self._call(what, self._client.tell, "/v1/unload_lora_adapter", {"lora_name": name})

    def ask(self, what: str, path: str, read: Callable[[Any], Answered]) -> Answered:
        """Return what ``read`` makes of the JSON value at ``path``. ``what`` describes the request in errors."""
        return self._call(what, self._client.get, path, read)

    def command(
        self, what: str, path: str, body: dict[str, Any], read: Callable[[Any], Answered] | None = None
    ) -> Answered | None:
        """Post ``body`` once, because the server may have begun, and return what ``read`` makes of its JSON answer.

        ``what`` describes the request in errors. Without ``read`` the answer may be anything.
        """
        if read is None:
            return self._call(what, self._client.tell, path, body, retries=0)
        return self._call(what, self._client.post, path, body, read, retries=0)

    def _call(
        self, what: str, function: Callable[..., Answered], *arguments: Any, retries: int | None = None
    ) -> Answered:
        try:
            return persistent(self.section.retries if retries is None else retries)(function, *arguments)
        except HttpFailure as error:
            raise VLLMFailure(f"{self.url}: {what}: {error}") from error
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
        ) as error:  # raised by what reads the answer
            raise VLLMFailure(
                f"{self.url}: {what}: its answer is not that of a vLLM server ({type(error).__name__}: {error}); is it "
                "one?"
            ) from error


def held_to(grammar: Grammar) -> dict[str, Any]:
    """Return vLLM's structured outputs of a grammar, which its backend ``guidance`` reads as training does."""
    [one] = json.loads(grammar.text)["grammars"]
    return {"json": one["json_schema"]} if "json_schema" in one else {"grammar": one["lark_grammar"]}


def seed_of(request: TokenRequest) -> int | None:
    """Return vLLM's seed of a request."""
    return None if request.key is None else number_of(request.key) % 2**63


def _version(answer: Any) -> str:
    return str(answer.get("version"))[:40]


def _bases(answer: Any) -> list[str]:
    """Return the names of the models, without those of adapters."""
    return [str(entry["id"]) for entry in answer["data"] if entry.get("parent") is None]


def _ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(number) is int and 0 <= number < 2**31 for number in ids):
        raise ValueError("no list of token ids")
    return ids


def _sampled(answer: Any, most: int) -> Sampled:
    """Return the completion in the answer, with at most ``most`` tokens, each with its log-probability."""
    choice = answer["choices"][0]
    if not choice.get("token_ids") or not choice.get("logprobs"):
        raise ValueError("no token ids or no log-probabilities")
    ids, logprobs = _ids(choice["token_ids"]), choice["logprobs"]["token_logprobs"]
    if len(ids) > most or len(logprobs) != len(ids):
        raise ValueError(
            f"{len(ids)} token ids and {len(logprobs)} log-probabilities, and at most {most} were asked for"
        )
    if not all(
        type(value) in (int, float) and -1e9 < value <= 0.001 for value in logprobs
    ):  # rounding may leave 0.0001
        raise ValueError("a log-probability that is not a finite number up to 0")
    if Stop.of(choice.get("finish_reason")) not in WHOLE:
        raise HttpFailure(f"its completion ended for the reason {choice.get('finish_reason')!r:.40}", passing=True)
    return Sampled(ids, [float(value) for value in logprobs])
