"""The routes of a server with OpenAI's and Anthropic's APIs, for a program of a dialogue or for a trained team.

Data flow: a client -> :func:`guarded` -> :func:`routes` (server's thread) -> :class:`Call` -> :meth:`Owner.put`; the
owner answers the call from any thread.
"""

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from maporl.guard import Budget, Door, Guard, Limits, read_json
from maporl.serving import anthropic, responses
from maporl.serving.wire import ChatRequest, Refused, chunks, completion, read_chat, said_so_far, with_headers
from maporl.types import Utterance

logger = logging.getLogger(__name__)

Reader = Callable[[Any, Sequence[str], Sequence[str]], ChatRequest]
"""Reads the JSON of a request, which may ask certain agents, and of which certain fields are left out."""
Writer = Callable[..., Any]
"""Writes an utterance as the reply to a request, with an id and the time, and then the other samples of the reply."""
Form = Callable[[Refused], dict[str, Any]]
"""Writes an error."""
CLIENT_GONE = 499
TOO_BUSY = "too_busy"
"""The code of a request that may be answered later."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(eq=False)
class Call:
    """A request that waits for its answer.

    Args:
        request: what is asked.
        loop: the event loop in which the client waits.
        done: the answer to come.
        heard: what was said on the way to it, or a part of its text, and None at its end.
        live: whether the client is shown what is said when it is said.
        gone: set when the client has left before its answer has come.
    """

    request: ChatRequest
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[tuple[Utterance, ...]]"
    heard: "asyncio.Queue[Utterance | str | None]" = field(default_factory=asyncio.Queue)
    live: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def tell(self, said: Utterance | str) -> None:
        """Tell what was said on the way to the answer, or the next part of its text."""
        self.loop.call_soon_threadsafe(self.heard.put_nowait, said)

    def answer(self, *samples: Utterance) -> None:
        """Send the utterances that answer it. What a client has given up is sent to nobody."""
        self._settle(lambda: self.done.set_result(samples))

    def refuse(self, why: Refused) -> None:
        """Send an error."""
        self._settle(lambda: self.done.set_exception(why))

    def _settle(self, settle: Callable[[], None]) -> None:
        def once() -> None:
            if not self.done.done():
                settle()
            self.heard.put_nowait(None)

        self.loop.call_soon_threadsafe(once)


class Owner(Protocol):
    """The owner of an address, which answers its calls."""

    name: str
    """What its replies are called."""
    agents: Sequence[str]
    """Who can be asked."""
    ignored: Sequence[str]
    """Fields of requests that are left out."""
    ignored_by: str
    """The option that says which."""
    count_tokens: Callable[[ChatRequest], "Future[int]"] | None
    """Counts the tokens of a request, if that can be done before it is answered."""

    def put(self, call: Call) -> None:
        """Take a call, in the server's thread. It may raise :class:`~maporl.serving.wire.Refused`."""

    def count(self, code: str, why: str) -> None:
        """Count a request that was refused."""


def routes(at: str) -> list[Any]:
    """Return the routes of an address that begins with ``at``. The scope of a request has its ``owner``."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    def replies(read: Reader, whole: Writer, pieces: Writer, prefix: str) -> Callable[[Owner, Request], Any]:
        async def handle(owner: Owner, request: Request) -> Response:
            asked = with_headers(read(await json_of(request), owner.agents, owner.ignored), request.headers)
            loop = asyncio.get_running_loop()
            call, created = Call(asked, loop, loop.create_future()), int(time.time())
            call.live = asked.stream and pieces is chunks
            owner.put(call)
            heard = await _heard(call, request)
            if heard is not None and call.live:
                spoken = _spoken(call, heard, f"{prefix}{owner.name}-{secrets.token_hex(6)}", created)
                return StreamingResponse(_events(spoken), media_type="text/event-stream")
            while heard is not None:  # on the way to the answer, which this form does not show
                heard = await _heard(call, request)
            if call.gone.is_set():
                return Response(status_code=CLIENT_GONE)
            first, *others = call.done.result()
            name = f"{prefix}{owner.name}-{first.id}"
            if not asked.stream:
                return JSONResponse(whole(first, asked, name, created, *others))
            told = _events(_one_by_one(pieces(first, asked, name, created, *others)))
            return StreamingResponse(told, media_type="text/event-stream")

        return handle

    chat = replies(read_chat, completion, chunks, "chatcmpl-")
    respond = replies(responses.read_response, responses.response, responses.events, "resp_")
    send = replies(anthropic.read_message, anthropic.message, anthropic.events, "msg_")

    async def count(owner: Owner, request: Request) -> Response:
        if owner.count_tokens is None:
            raise Refused(anthropic.UNCOUNTED, status=404, code="not_found")
        body = await json_of(request)
        asked = {**body, "max_tokens": 1} if isinstance(body, dict) else body
        read = anthropic.read_message(asked, owner.agents, owner.ignored)
        return JSONResponse({"input_tokens": await asyncio.wrap_future(owner.count_tokens(read))})

    async def models(owner: Owner, request: Request) -> Response:
        entries = [{"id": agent, "object": "model", "created": 0, "owned_by": "maporl"} for agent in owner.agents]
        return JSONResponse({"object": "list", "data": entries})

    return [
        Route(f"{at}/chat/completions", answered(chat), methods=["POST"]),
        Route(f"{at}/responses", answered(respond), methods=["POST"]),
        *[
            Route(f"{at}{more}/messages{path}", answered(handle), methods=["POST"])
            for more in ("", "/v1")  # Anthropic's clients add /v1 to the address that they are given
            for path, handle in (("", send), ("/count_tokens", count))
        ],
        Route(f"{at}/models", answered(models), methods=["GET"]),
    ]


def answered(handle: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return the endpoint that answers by ``handle``, which takes the owner of the address and the request."""
    from starlette.responses import JSONResponse

    async def endpoint(request: Any) -> Any:
        owner: Owner = request.scope["owner"]
        try:
            return await handle(owner, request)
        except Refused as error:
            refused = error
        except Exception:
            refused = internal()
        refused.message = refused.message.replace("protocol.ignore", owner.ignored_by)
        owner.count(refused.code, refused.message)
        # asked again, most would be refused again; clients would ask, where there are too many calls
        again = {"retry-after": "1"} if refused.code == TOO_BUSY else {"x-should-retry": "false"}
        return JSONResponse(form_of(request.scope["path"])(refused), refused.status, again)

    return endpoint


def internal() -> Refused:
    """Return how a request is refused whose exception is being handled, which the log tells."""
    logger.exception("a request failed; this is an error of maporl")
    return Refused("maporl failed at this request; its log says why", status=500, code="internal")


def guarded(app: Any, limits: Limits, door: Door) -> Any:
    """Return ``app`` behind a guard, whose errors have the form of the path, whatever ``door`` writes."""
    budget = Budget(limits.held)
    forms: tuple[Form, ...] = (Refused.body, anthropic.error)
    guards = {form: Guard(app, limits, replace(door, write_error=error_in(form)), budget) for form in forms}

    async def by_form(scope: Any, receive: Any, send: Any) -> None:
        await guards[form_of(scope.get("path", ""))](scope, receive, send)

    return by_form


def form_of(path: str) -> Form:
    """Return how an error is written in answer to a request to ``path``."""
    return anthropic.error if "messages" in path.split("/")[2:6] else Refused.body


def error_in(form: Form) -> Callable[[int, str, str], bytes]:
    """Return what writes the body of an error in a form."""
    return lambda status, code, text: json.dumps(form(Refused(text, status=status, code=code))).encode()


async def json_of(request: Any) -> Any:
    """Return the JSON of a request.

    Raises:
        Refused: it cannot be read.
    """
    try:
        return read_json(await request.body())
    except ValueError as error:
        raise Refused(f"the request is not JSON that can be read: {error}", code="invalid_json") from None


async def _heard(call: Call, request: Any) -> Utterance | str | None:
    """Return what is said next on the way to an answer. None: it is there, or the client has gone."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting = asyncio.ensure_future(call.heard.get()), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting[0].done():
            return waiting[0].result()
        call.gone.set()
        return None
    finally:
        for one in waiting:
            one.cancel()


async def _spoken(call: Call, heard: Utterance | str | None, name: str, created: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the pieces of a stream: what is said on the way to the answer, and parts of it, when they are said."""
    sent = 0
    try:
        while heard is not None:
            yield said_so_far(heard, call.request, name, created)
            sent += len(heard) if isinstance(heard, str) else 0
            heard = await call.heard.get()
        try:
            answer = call.done.result()
        except Refused as refused:
            yield refused.body()
            return
        for piece in chunks(answer[0], call.request, name, created, sent=sent):
            yield piece
    finally:
        call.gone.set()  # nobody reads any more


async def _one_by_one(pieces: Iterable[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    for piece in pieces:
        yield piece


async def _events(pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield the pieces of a stream as server-sent events. Those of a response have names, and it ends with the last."""
    named = ""
    async for piece in pieces:
        named = f"event: {piece['type']}\n" if "type" in piece else ""
        yield f"{named}data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    if not named:
        yield "data: [DONE]\n\n"
