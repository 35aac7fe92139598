"""The client of a service: the only module that calls Tinker's SDK.

The SDK sends a request again that was refused for a while (429, 5xx, a lost connection), under its sequence number, so
that the service does the work once. What fails for good is a :class:`ServiceFailure`, and never a number.
"""

import json
import logging
import os
import tarfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import httpx2
import torch
from safetensors import safe_open
from torch import Tensor

from maporl.errors import UserError, one_line
from trl_ext.process.waits import Threads, result

NO_KEY = "tml-no-key"
"""What is sent to a server that needs no key. The SDK wants one that begins so."""
MOST_ROWS, MOST_TOKENS = 256, 100_000
"""The most rows, and tokens, of a request. The SDK would cut a larger one, and a mean would be one over its pieces."""
KEPT_SECONDS = 7 * 24 * 3600
"""How long the service keeps the state after an update, from which a lost session is opened again."""
GONE = (404, 410)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
logger = logging.getLogger(__name__)


class ServiceFailure(UserError, RuntimeError):
    """A service that speaks the Tinker API failed, or did what it must not. The message says what to do."""


class SessionLost(ServiceFailure):
    """The service has closed the session, and its adapters are gone."""


@dataclass(frozen=True)
class Row:
    """A sequence whose tokens from ``first`` on were sampled. ``first`` is at least 1."""

    ids: Sequence[int]
    first: int

    @property
    def length(self) -> int:
        """Return the number of tokens that have a log-probability."""
        return len(self.ids) - 1


class Service:
    """A service at an address, with its sessions.

    Args:
        url: the address. None: the Tinker service.
        key_variable: the environment variable that has the key.
        sessions: the number of sessions.
        seconds: how long an answer may take.

    Raises:
        ServiceFailure: the service does not answer.
    """

    def __init__(self, url: str | None, key_variable: str, sessions: int, seconds: float):
        os.environ.setdefault("TINKER_TELEMETRY", "0")  # the SDK would report each error to its makers
        self.url, self.seconds, self.name = url, seconds, url or "the Tinker service"
        self.key = os.environ.get(key_variable) or (NO_KEY if url else None)
        self.facts: dict[str, dict[str, Any]] = {}
        """What the probe has measured with each base model (:mod:`maporl.integrations.tinker.probe`)."""
        self._sessions: list[Any] = [None] * sessions
        self._opening = Lock()

    def session(self, number: int) -> Any:
        """Return the SDK's client of a session, which is opened if it is not open."""
        import tinker

        number %= len(self._sessions)
        with self._opening:
            if self._sessions[number] is None:
                open_session = partial(tinker.ServiceClient, base_url=self.url, api_key=self.key)
                self._sessions[number] = self.ask("open a session", open_session)
            return self._sessions[number]

    def forget(self) -> None:
        """Let the next :meth:`session` open another one, because these are lost."""
        self._sessions = [None] * len(self._sessions)

    def base(self, model: str, number: int = 0) -> Any:
        """Return the SDK's client that samples from a base model."""
        return self.done(f"sample from {model}", self.session(number).create_sampling_client, base_model=model)

    def ask(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what a method of the SDK returns, which may be a future.

        Raises:
            SessionLost: the service has closed the session.
            ServiceFailure: the request failed, or took too long.
        """
        try:
            return call(*arguments, **options)
        except Exception as error:
            raise self.failure(what, error) from error

    def answer(self, what: str, future: Any) -> Any:
        """Return the result of a future of the SDK, or a client that it returned at once. The errors are those of
        :meth:`ask`."""
        if not isinstance(future, Future) and not hasattr(future, "future"):
            return future  # older SDKs return clients themselves
        return self.ask(what, result, plain(future), self.seconds)

    def done(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Ask and wait."""
        return self.answer(what, self.ask(what, call, *arguments, **options))

    def failure(self, what: str, error: BaseException) -> ServiceFailure:
        """Return what an exception of the SDK means to a user."""
        if isinstance(error, ServiceFailure):
            return error
        if isinstance(error, TimeoutError):
            remedy = "raise cluster.failures.deadline, or resume later"
            return ServiceFailure(f"{self.name}: no answer within {self.seconds:g} s, asked to {what}; {remedy}")
        said = f"{type(error).__name__}: {one_line(error, 300)}"
        if any(getattr(one, "status_code", None) in GONE for one in _causes(error)):
            return SessionLost(f"{self.name}: has closed the session, asked to {what} ({said}); resume the run")
        return ServiceFailure(f"{self.name}: failed when asked to {what} ({said}); resume the run when it is back")

    def get(self, url: str) -> bytes:
        """Return what is at an address, of which only one of the service itself is shown the key."""
        with Threads(1, "downloads") as threads:
            return result(threads.submit(self._get, url), self.seconds)

    def _get(self, url: str) -> bytes:
        own = self.url is not None and urlsplit(url).netloc == urlsplit(self.url).netloc
        headers = {"X-API-Key": self.key} if own and self.key else {}
        options: Any = {"timeout": self.seconds, "follow_redirects": not headers}  # the key goes to no other server
        return httpx2.get(url, headers=headers, **options).raise_for_status().content

    def unload(self, model: str) -> bool:
        """Ask a server to forget an adapter. Return False if it does not know how; the end of the session does it."""
        if self.url is None:
            return False
        body, headers = {"model_id": model, "type": "unload_model"}, {"X-API-Key": str(self.key)}
        return httpx2.post(f"{self.url}/api/v1/unload_model", json=body, headers=headers, timeout=30).is_success

    def close(self) -> None:
        """End all sessions, and with them what the service holds for them."""
        for client in filter(None, self._sessions):
            try:
                if hasattr(client, "close"):
                    result(plain(client.close("success")), 30.0)
                else:  # older SDKs only end what they do here
                    client.holder.close()
            except Exception as error:
                logger.warning("%s: %s", self.name, self.failure("end a session", error))
        self.forget()


@dataclass
class Adapter:
    """A LoRA on the service, which is made when it is first needed.

    Args:
        service: where it is.
        label: its name in errors.
        base: the name of its base model.
        rank: its rank.
        seed: the seed of its first weights.
        session: the number of its session.
        last: the address of the state that it begins from. None: new weights.
    """

    service: Service
    label: str
    base: str
    rank: int
    seed: int
    session: int = 0
    last: str | None = None
    _client: Any = field(default=None, repr=False)
    _keeping: Any = field(default=None, repr=False)

    @property
    def client(self) -> Any:
        """Return the SDK's training client."""
        if self._client is None:
            session = self.service.session(self.session)
            if self.last is None:
                # unembeddings stay as they are, as with PEFT's all-linear
                options = {"rank": self.rank, "seed": self.seed, "train_unembed": False}
                what, make = f"make a LoRA on {self.base}", partial(session.create_lora_training_client, **options)
                self._client = self._done(what, make, self.base)
            else:
                load = session.create_training_client_from_state_with_optimizer
                self._client = self._done(f"load {self.last}", load, self.last)
        return self._client

    def _ask(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.service.ask(f"{what} for {self.label}", call, *arguments, **options)

    def _done(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.service.done(f"{what} for {self.label}", call, *arguments, **options)

    def answer(self, what: str, future: Any) -> Any:
        """Return the result of a future of the SDK (:meth:`Service.answer`)."""
        return self.service.answer(f"{what} for {self.label}", future)

    def forward(self, rows: Sequence[Row]) -> list[Any]:
        """Ask for the log-probabilities of ``rows`` (:meth:`logprobs`)."""
        parts = [[_datum(row, weights=torch.ones(row.length)) for row in part] for part in pieces(rows)]
        return [self._ask("read rows", self.client.forward, part, "cross_entropy") for part in parts]

    def logprobs(self, rows: Sequence[Row], asked: Sequence[Any]) -> list[Tensor]:
        """Return the log-probabilities of the sampled tokens of each row, in float32.

        Raises:
            ServiceFailure: some are missing, or are not finite.
        """
        answers = [one for future in asked for one in self.answer("read rows", future).loss_fn_outputs]
        found = [torch.tensor(answer["logprobs"].data, dtype=torch.float32) for answer in answers]
        if [len(one) for one in found] != [row.length for row in rows]:
            raise ServiceFailure(
                f"{self.service.name}: asked for the log-probabilities of {len(rows)} rows for {self.label}, and got "
                f"{len(found)}, or of other lengths; it is not a server of the Tinker API that can be trained with"
            )
        sampled = [one[row.first - 1 :] for row, one in zip(rows, found, strict=True)]
        if not all(bool(one.isfinite().all()) for one in sampled):
            raise ServiceFailure(
                f"{self.service.name}: a log-probability for {self.label} is not finite; resume the run"
            )
        return sampled

    def backward(self, rows: Sequence[Row], logprobs: Sequence[Tensor], gradient: Sequence[Tensor]) -> list[Any]:
        """Ask for gradients of a step, where ``gradient`` is that of the loss by the log-probability of each sampled
        token. ``rows`` are all of the step.

        ``importance_sampling`` at a ratio of 1 has the gradient of ``-sum(advantage * logprob)``.
        """
        asked, facts = [], self.service.facts.get(self.base, {})
        for part, olds, slopes in zip(pieces(rows), pieces(rows, logprobs), pieces(rows, gradient), strict=True):
            counted = rows if facts.get("over") == "step" else part
            factors = facts.get("divides", "sum"), len(counted), sum(row.length for row in counted)
            data = [
                _datum(row, logprobs=_padded(row, old), advantages=_padded(row, -slope * times(row.length, *factors)))
                for row, old, slope in zip(part, olds, slopes, strict=True)
            ]
            asked.append(self._ask("train", self.client.forward_backward, data, "importance_sampling"))
        return asked

    def step(self, **options: float) -> Any:
        """Ask for a step of Adam with the gradients that were asked for before."""
        import tinker

        return self._ask("step", self.client.optim_step, tinker.AdamParams(**options))

    def keep(self, name: str) -> None:
        """Begin to keep the present state for as long as a lost session may need it (:attr:`last`)."""
        self.kept()
        self._keeping = self._ask("keep its state", self.client.save_state, name, ttl_seconds=KEPT_SECONDS)

    def kept(self) -> None:
        """Wait for :meth:`keep`."""
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            self.last = self.answer("keep its state", keeping).path

    def save(self, name: str) -> str:
        """Return the address of the present state, which the service keeps."""
        return self._done("save its state", self.client.save_state, name).path

    def snapshot(self, name: str) -> str:
        """Return the address of the present weights, to sample from."""
        return self._done("save a snapshot", self.client.save_weights_for_sampler, name).path

    def sampler(self, path: str | None = None) -> Any:
        """Return the SDK's client that samples from the present weights, or from a snapshot."""
        if path is not None:
            return self._done(f"sample from {path}", self.service.session(self.session).create_sampling_client, path)
        return self._done("sample", self.client.save_weights_and_get_sampling_client)

    def download(self, name: str, folder: Path) -> None:
        """Write the present weights into ``folder``, as PEFT does.

        Raises:
            ServiceFailure: the service does not give them.
        """
        service = self.service
        with warnings.catch_warnings():  # newer SDKs have another way, whose connections nothing closes
            warnings.simplefilter("ignore", FutureWarning)
            rest = self._ask("download its weights", service.session(self.session).create_rest_client)
        if hasattr(rest, "get_checkpoint_archive_url"):
            path = self.snapshot(name)
            run, _, checkpoint = path.removeprefix("tinker://").partition("/")
            address = self._done("pack its weights", rest.get_checkpoint_archive_url, run, checkpoint).url
            packed = BytesIO(self._ask("download its weights", service.get, address))
            with tarfile.open(fileobj=packed) as archive:
                archive.extractall(folder, filter="data")
            for known in (CONFIG, WEIGHTS):  # some servers put them into a folder of the archive
                for found in list(folder.rglob(known)):
                    found.replace(folder / known)
        else:  # since 0.36
            path = self._done("export its weights", self.client.save_weights_external, name).path
            addresses = self._done("export its weights", rest.get_external_weights_urls, path).urls
            for known in {CONFIG, WEIGHTS} & addresses.keys():
                content = self._ask("download its weights", service.get, addresses[known])
                (folder / known).write_bytes(content)
        config, weights = folder / CONFIG, folder / WEIGHTS
        if not config.is_file() or not weights.is_file():
            raise ServiceFailure(f"{service.name}: what is at {path} of {self.label} does not look like a LoRA of PEFT")
        options = json.loads(config.read_bytes())
        if not options.get("target_modules"):  # some servers leave out what their tensors say
            with safe_open(weights, "pt") as tensors:
                options["target_modules"] = sorted({name.split(".lora_")[0].split(".")[-1] for name in tensors.keys()})  # noqa: SIM118
            config.write_text(json.dumps(options, indent=1))

    def load(self, path: str) -> None:
        """Begin from the state at ``path`` instead."""
        self.unload()
        self.last = path

    def unload(self) -> None:
        """Let the service forget the adapter. It is made again, from its last state, when it is needed."""
        client, self._client, self._keeping = self._client, None, None
        if client is not None:
            with suppress(httpx2.HTTPError):  # it ends with its session, or is lost already
                self.service.unload(client.model_id)


def pieces(rows: Sequence[Row], values: Sequence[Any] | None = None) -> list[list[Any]]:
    """Cut ``rows`` into those of one request each, and return them, or the ``values`` that belong to them."""
    parts: list[list[Any]] = []
    tokens = MOST_TOKENS + 1
    for row, value in zip(rows, rows if values is None else values, strict=True):
        if tokens + row.length > MOST_TOKENS or len(parts[-1]) == MOST_ROWS:
            parts.append([])
            tokens = 0
        parts[-1].append(value)
        tokens += row.length
    return parts


def times(length: int, divides: str, rows: int, tokens: int) -> float:
    """Return by what an advantage is multiplied, so that a server adds up what it divides.

    Args:
        length: the tokens of the row.
        divides: by what the server divides: ``sum`` (by nothing), ``rows``, ``tokens``, ``sequence`` (each row by its
            tokens) or ``sequence and rows``.
        rows: the rows of the request, or of the step if the server divides by those.
        tokens: their tokens.
    """
    by = {"sum": 1, "rows": rows, "tokens": tokens, "sequence": length, "sequence and rows": length * rows}
    return float(by[divides])


def plain(future: Any) -> Future[Any]:
    """Return the ``concurrent.futures.Future`` of a future of the SDK."""
    return future if isinstance(future, Future) else future.future()


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _datum(row: Row, **fields: Tensor) -> Any:
    import tinker

    targets = tinker.TensorData(data=list(row.ids[1:]), dtype="int64", shape=[row.length])
    inputs = {k: tinker.TensorData(data=v.tolist(), dtype="float32", shape=[row.length]) for k, v in fields.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(row.ids[:-1])), loss_fn_inputs={"target_tokens": targets, **inputs}
    )


def _padded(row: Row, values: Tensor) -> Tensor:
    """Return the values of the sampled tokens of a row with a 0 for each token before them."""
    return torch.cat([torch.zeros(row.first - 1), values.float()])
