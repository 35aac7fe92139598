"""The HTTP interface of the server.

Data flow: Guard (token, size, time) -> schema -> ``Scorer.prepare`` in a thread -> ``Batcher`` -> one result per chat.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from maporl.guard import Budget, Door, Guard, Limits, check_host, check_token, error_body
from reward_server.batching import Batcher, Outcome, QueueFull
from reward_server.options import ServerOptions
from reward_server.schemas import (
    ErrorBody,
    Item,
    ItemError,
    ModelInfo,
    PredictRequest,
    PredictResponse,
    ScoreRequest,
    ScoreResponse,
    Status,
)
from reward_server.scorers import Prepared, Scorer
from reward_server.telemetry import Telemetry

logger = logging.getLogger(__name__)
REMEMBERED = 1024
"""The results of so many requests are kept, for clients that ask again with the same id."""
REMEMBERED_BYTES = 64 * 2**20
"""The most bytes that kept results take."""
ITEM_BYTES = 1024
"""What the result of one chat takes in memory, besides the text of its error."""
MESSAGE_BYTES = 512
"""What one message takes in memory, besides its text."""
HELD_BODIES = 32
"""Requests in progress may hold the bytes of so many of the largest bodies. They hold the chats as well."""
OPEN = frozenset({"/health", "/ready"})
"""The paths that need no token, because supervisors ask for them."""
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The body is not JSON",
        401: "The token is missing or wrong",
        403: "The request names another host, and the server has no token",
        408: "The request arrived too slowly",
        409: "The request id was used for another request",
        413: "The request is too large",
        422: "A value is not what the schema says",
        429: "Too much is waiting; Retry-After says when to come back",
    }.items()
}
_STATUS_CODES = {404: "not_found", 405: "method_not_allowed"}


def limits_of(options: ServerOptions) -> Limits:
    """The bounds of a server with these options."""
    body = options.body_bytes
    return Limits(seconds=options.body_seconds, body=body, held=HELD_BODIES * body)


def create_app(scorers: Sequence[Scorer], options: ServerOptions) -> FastAPI:
    """The application. ``scorers`` are copies of one scorer; each works in a thread of its own."""
    telemetry, limits = Telemetry(), limits_of(options)
    budget = Budget(limits.held)
    service = Service(scorers, options, telemetry, budget)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(title="maporl reward server", version="1", lifespan=lifespan)
    app.state.service = service

    @app.post("/v1/score", responses=_REFUSALS)
    async def score(request: Request, body: ScoreRequest) -> ScoreResponse:
        """Score the last message of every chat. Each chat gets a score or an error of its own."""
        chats = [[message.model_dump() for message in chat] for chat in body.chats]
        references = [None] * len(chats) if body.references is None else body.references
        if len(references) != len(chats):
            raise Refusal(422, "wrong_length", f"expected {len(chats)} references, got {len(references)}", "references")
        items = await service.answer(request, body.request_id, chats, references)
        info = service.info
        return ScoreResponse(request_id=body.request_id, model=info.name, sha256=info.sha256, results=items)

    @app.post("/predict", responses=_REFUSALS)
    async def predict(request: Request, body: PredictRequest) -> PredictResponse:
        """MAPoRL's own interface: either all scores, or one error for the whole request."""
        chats = [[message.model_dump() for message in chat] for chat in body.query_responses]
        items = await service.answer(request, None, chats, [None] * len(chats))
        for index, item in enumerate(items):
            if item.error is not None:
                raise Refusal(422, item.error.code, item.error.message, f"query_responses.{index}")
        return PredictResponse(result=[item.score for item in items if item.score is not None])

    @app.get("/health")
    async def health() -> Status:
        """Whether the process answers."""
        return Status(status="ok")

    @app.get("/ready", responses={503: {"model": Status, "description": "The server is being stopped"}})
    async def ready() -> Response:
        """Whether the server takes requests."""
        draining = service.draining
        body = Status(status="draining" if draining else "ready")
        return JSONResponse(body.model_dump(), 503 if draining else 200)

    @app.get("/metrics", responses={401: _REFUSALS[401]}, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The server's counters in Prometheus's text format."""
        return Response(telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/model", responses={401: _REFUSALS[401]})
    async def model() -> ModelInfo:
        """The verifier or grader that scores here."""
        return service.info

    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))

    def enter(scope: Any, headers: Any) -> None:
        if options.token is None:
            check_host(headers)
        elif scope["path"] not in OPEN:
            check_token(headers, options.token)

    def log(method: str, path: str, status: int, seconds: float) -> None:
        path = path if path in paths else "other"
        telemetry.request(path, status, seconds)
        level = logging.WARNING if status in (401, 403) else logging.INFO
        logger.log(level, "%s %s: %s in %.0f ms", method, path, status or "client gone", 1000 * seconds)

    app.add_middleware(Guard, limits=limits, door=Door(enter, log=log), budget=budget)
    return app


class Refusal(Exception):
    """A request is refused; becomes an answer with ``status`` and an :class:`ErrorBody`. It never ends the process."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.field, self.retry_after = status, code, message, field, retry_after


class Service:
    """Scores requests: prepares their chats, batches them with those of other requests, and remembers the results."""

    def __init__(self, scorers: Sequence[Scorer], options: ServerOptions, telemetry: Telemetry, budget: Budget):
        self.scorer, self.options, self.telemetry, self.budget = scorers[0], options, telemetry, budget
        self.info = self.scorer.info
        self.batcher = Batcher(
            scorers, options.batch_tokens or self.scorer.batch_tokens, options.queue_items, telemetry
        )
        self.draining = False
        self._asked: OrderedDict[str, Asked] = OrderedDict()

    def start(self) -> None:
        """Start the threads that score."""
        self.batcher.start()

    async def stop(self) -> None:
        """Stop the threads. By then the requests in progress are answered."""
        self.draining = True
        await self.batcher.stop()

    async def answer(
        self, request: Request, request_id: str | None, chats: list, references: Sequence[str | None]
    ) -> list[Item]:
        """The results for the chats of one request, in order.

        Raises:
            Refusal: the client has gone, the server is too busy, or the id was used for other chats.
        """
        task = self._task(request_id, chats, references)
        gone = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait({task, gone}, timeout=self.options.answer_seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if request_id is None:
                task.cancel()
            if gone.done():
                raise Refusal(408, "client_gone", "the client closed its connection")
            seconds = self.options.answer_seconds
            raise Refusal(429, "too_busy", f"not answered within {seconds:g} s; try again", retry_after=1)
        except QueueFull as error:
            raise Refusal(429, "queue_full", "too many chats are waiting", retry_after=error.retry_after) from None
        finally:
            gone.cancel()

    def _task(
        self, request_id: str | None, chats: list, references: Sequence[str | None]
    ) -> "asyncio.Task[list[Item]]":
        """The task that scores a request, or that of an earlier request with the same id if it did not fail."""
        if request_id is None:
            return self._begin(chats, references)
        digest = hashlib.sha256(repr((chats, list(references))).encode()).digest()
        earlier = self._asked.get(request_id)
        if earlier is not None and not _failed_task(earlier.task):
            if earlier.digest != digest:
                raise Refusal(
                    409, "request_id_reused", f"request id {request_id!r} was used for other chats", "request_id"
                )
            return earlier.task
        asked = self._asked[request_id] = Asked(digest, self._begin(chats, references))
        self._asked.move_to_end(request_id)
        asked.task.add_done_callback(lambda _: self._forget())
        self._forget()
        return asked.task

    def _begin(self, chats: list, references: Sequence[str | None]) -> "asyncio.Task[list[Item]]":
        """Start to score. The task may outlive its request, so it holds bytes of the budget by itself."""
        size = sum(MESSAGE_BYTES + len(message["content"]) for chat in chats for message in chat)
        size += sum(len(reference) for reference in references if reference is not None)
        if not self.budget.take(size):
            raise Refusal(429, "too_busy", "other requests fill the server's memory; try again", retry_after=1)
        task = asyncio.create_task(self._score(chats, references))
        task.add_done_callback(lambda _: self.budget.give(size))
        return task

    def _forget(self) -> None:
        """Forget the oldest requests until the others are few enough and their results small enough."""
        size = sum(asked.size() for asked in self._asked.values())
        while len(self._asked) > REMEMBERED or (size > REMEMBERED_BYTES and self._asked):
            _, oldest = self._asked.popitem(last=False)
            size -= oldest.size()

    async def _score(self, chats: list, references: Sequence[str | None]) -> list[Item]:
        prepared = await asyncio.to_thread(
            lambda: [self.scorer.prepare(chat, reference) for chat, reference in zip(chats, references, strict=True)]
        )
        outcomes = iter(await self.batcher.score([item for item in prepared if isinstance(item, Prepared)]))
        return [self._item(next(outcomes) if isinstance(item, Prepared) else item) for item in prepared]

    def _item(self, outcome: Outcome) -> Item:
        if isinstance(outcome, ItemError):
            self.telemetry.item(outcome.code)
            return Item(error=outcome)
        self.telemetry.item("scored")
        return Item(score=outcome)


@dataclass
class Asked:
    """A request with an id: the digest of its chats, and the task that scores them."""

    digest: bytes
    task: "asyncio.Task[list[Item]]"

    @cached_property
    def _kept(self) -> int:
        return sum(ITEM_BYTES + (len(item.error.message) if item.error else 0) for item in self.task.result())

    def size(self) -> int:
        """The bytes that its results take. It has none before it is done."""
        return self._kept if self.task.done() and not _failed_task(self.task) else 0


def _failed_task(task: asyncio.Task) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(
    status: int, code: str, message: str, field: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    return Response(error_body(status, code, message, field), status, headers, "application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
    return _answer(error.status, error.code, error.message, error.field, headers)


async def _invalid(_: Request, error: Exception) -> Response:
    """Answer with the first fault only. The value itself is left out, because it may be long or no valid text."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    kind, place = fault["type"], [str(part) for part in fault["loc"] if part != "body"]
    if kind == "json_invalid":
        return _answer(
            400, "malformed_json", f"the body is not JSON: {fault.get('ctx', {}).get('error', 'unreadable')}"
        )
    if kind in ("too_many_chats", "too_many_messages"):
        return _answer(413, kind, fault["msg"], ".".join(place))
    return _answer(422, "invalid_value", fault["msg"], ".".join(place) or None)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _STATUS_CODES.get(error.status_code, "malformed_json" if error.status_code == 400 else "refused")
    return _answer(error.status_code, code, str(error.detail), headers=dict(error.headers or {}))


async def _failed(_: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return _answer(500, "internal", "the server failed at this request; its log says why")
