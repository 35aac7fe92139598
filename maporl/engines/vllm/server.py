"""The client of one ``vllm serve``, and the interface that the engine needs of any vLLM."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from maporl.config.schema import VLLMSection
from maporl.errors import ConfigError, UserError
from trl_ext.ppo_options import Decoding
from trl_ext.sampling import Sampled

OLDEST = (0, 14)
"""The oldest vLLM whose completions return token ids for prompts that are token ids; 0.32.0 is tested."""


class VLLMFailure(UserError, RuntimeError):
    """A vLLM server gave no answer, or is not what the configuration needs. The message names the server."""


@dataclass(frozen=True)
class Asked:
    """One request to a server.

    Args:
        label: the request's name in errors.
        model: the server's name of the model or adapter.
        prompt: the token ids of the prompt.
        most: the most tokens of the completion.
        decoding: how tokens are drawn.
        stop_ids: the token ids that end the completion.
        seed: the seed of sampling, or None.
    """

    label: str
    model: str
    prompt: list[int]
    most: int
    decoding: Decoding
    stop_ids: frozenset[int]
    seed: int | None = None


class Server(Protocol):
    """Where vLLM runs: at a URL, or in this process."""

    url: str

    @property
    def base(self) -> str:
        """Return the server's name of the base model."""

    def answer(self, asked: Sequence[Asked]) -> list[Sampled]:
        """Sample one completion for each request, in order. Its ids include the stop id."""

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""

    def load(self, name: str, folder: Path, what: str) -> None:
        """Load the adapter in ``folder`` as ``name``. The folder may be removed afterwards.

        ``what`` describes the request in errors.
        """

    def unload(self, name: str, what: str) -> None:
        """Remove the adapter ``name``. ``what`` describes the request in errors."""


class RemoteServer:
    """One ``vllm serve`` at a URL. The client of package ``openai`` retries failed requests.

    Args:
        url: the server's address, such as ``http://127.0.0.1:8000``.
        section: the options of the policy that uses the server first.

    Raises:
        ConfigError: the package ``openai`` is not installed.
    """

    def __init__(self, url: str, section: VLLMSection):
        try:
            import openai
        except ImportError as error:
            raise ConfigError(
                "engine: vllm needs the package openai; install it with: pip install 'maporl[api]'"
            ) from error
        self.url, self.section = url.rstrip("/"), section
        self._client = openai.OpenAI(
            api_key=os.environ.get(section.key_variable, "none"),
            base_url=self.url + "/v1",
            timeout=section.timeout,
            max_retries=section.retries,
        )
        self._base: str | None = None

    @property
    def base(self) -> str:
        """Return the server's name of the base model. The first call also checks the version of vLLM.

        Raises:
            VLLMFailure: the server does not answer, is too old, or does not serve the configured base model.
        """
        if self._base is None:
            version = str(self._call("asking for its version", lambda: self._get("/version")).get("version"))
            parts = [int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit()]
            if len(parts) == 2 and tuple(parts) < OLDEST:
                raise VLLMFailure(f"{self.url}: is vLLM {version}, and {'.'.join(map(str, OLDEST))} or newer is needed")
            listed = self._call("asking for its models", lambda: self._get("/v1/models"))["data"]
            bases = [entry["id"] for entry in listed if entry.get("parent") is None]
            wanted = self.section.base
            if not bases or (wanted is not None and wanted not in bases):
                raise VLLMFailure(f"{self.url}: serves {bases}, and agents.NAME.vllm.base is {wanted!r}")
            self._base = wanted or bases[0]
        return self._base

    def answer(self, asked: Sequence[Asked]) -> list[Sampled]:
        """Sample one completion for each request, in order. At most ``concurrency`` requests run at a time.

        Raises:
            VLLMFailure: the server gave no answer, or an answer without token ids.
        """
        with ThreadPoolExecutor(self.section.concurrency) as pool:
            return list(pool.map(self._complete, asked))

    def _complete(self, asked: Asked) -> Sampled:
        body = {
            "return_token_ids": True,
            "stop_token_ids": sorted(asked.stop_ids),
            "ignore_eos": True,
            "top_k": asked.decoding.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        options: dict[str, Any] = {} if asked.seed is None else {"seed": asked.seed}

        def ask() -> Any:
            return self._client.completions.create(
                model=asked.model, prompt=asked.prompt, max_tokens=asked.most,
                temperature=asked.decoding.temperature, top_p=asked.decoding.top_p,
                logprobs=0, extra_body=body, **options,
            )  # fmt: skip

        choice = self._call(f"{asked.label}, model {asked.model!r}", ask).choices[0]
        ids = getattr(choice, "token_ids", None)
        if not ids or choice.logprobs is None:
            raise VLLMFailure(
                f"{self.url}: {asked.label}: its answer has no token ids or no log-probabilities; is it a vLLM server?"
            )
        return Sampled(list(ids), [float(v) for v in choice.logprobs.token_logprobs])

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of ``text`` by the server's tokenizer, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._call("tokenising", lambda: self._send("/tokenize", body))["tokens"]

    def load(self, name: str, folder: Path, what: str) -> None:
        """Let the server load the adapter in ``folder`` as ``name``. ``what`` describes the request in errors."""
        self._post("load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, what)

    def unload(self, name: str, what: str) -> None:
        """Let the server remove the adapter ``name``. ``what`` describes the request in errors."""
        self._post("unload_lora_adapter", {"lora_name": name}, what)

    def _post(self, path: str, body: dict[str, Any], what: str) -> None:
        self._call(what, lambda: self._client.post(f"/{path}", body=body, cast_to=str))

    def _get(self, path: str) -> Any:
        return self._client.get(self.url + path, cast_to=object)

    def _send(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(self.url + path, body=body, cast_to=object)

    def _call(self, what: str, function: Any) -> Any:
        import openai

        try:
            return function()
        except openai.APITimeoutError as error:
            raise VLLMFailure(
                f"{self.url}: {what}: no answer within {self.section.timeout:g} s, {self.section.retries + 1} times; raise "
                "agents.NAME.vllm.timeout, or look at the server"
            ) from error
        except openai.OpenAIError as error:
            raise VLLMFailure(f"{self.url}: {what}: {type(error).__name__}: {' '.join(str(error).split())}") from error
