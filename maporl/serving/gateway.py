"""The server through which programs reach their agents: on loopback, in this process, with a token for each dialogue.

Data flow: a client -> :class:`Gateway` (server's thread) -> :class:`Call` in the :class:`Session` of its dialogue,
which the protocol takes (driver's thread) and answers with what the agent has said.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from maporl.errors import ConfigError, install_command
from maporl.guard import Budget, Denied, Door, Guard, Limits, check_host, read_json
from maporl.serving import anthropic, responses
from maporl.serving.wire import ChatRequest, Refused, chunks, completion, read_chat, with_headers
from maporl.types import Utterance
from trl_ext.process.waits import pause

logger = logging.getLogger(__name__)
SETTLE = 0.002
"""Seconds without another request after which those of a dialogue are asked, so that parallel ones come together."""
LIMITS = Limits()

Reader = Callable[[Any, Sequence[str], Sequence[str]], ChatRequest]
"""Reads the JSON of a request, which may ask certain agents, and of which certain fields are left out."""
Writer = Callable[..., Any]
"""Writes an utterance as the reply to a request, with an id and the time, and then the other samples of the reply."""
Form = Callable[[Refused], dict[str, Any]]
"""Writes an error."""


@dataclass(eq=False)
class Call:
    """A request of a program that waits for its answer.

    Args:
        request: what is asked.
        loop: the event loop in which the client waits.
        done: the answer to come.
    """

    request: ChatRequest
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[tuple[Utterance, ...]]"

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

        self.loop.call_soon_threadsafe(once)


@dataclass
class Report:
    """A reward that a program reports for an agent, or for all of them if ``agent`` is None."""

    value: float
    agent: str | None = None


@dataclass
class Session:
    """One dialogue of a program.

    Args:
        name: what its replies are called.
        secret: the token in its address.
        root: the address of the server.
        agents: who can be asked.
        ignored: fields of requests that are left out.
        reports: rewards that nobody has taken yet.
        refused: why requests were refused.
        denied: how many were, of which one may have several reasons.
    """

    name: str
    secret: str
    root: str
    agents: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    reports: list[Report] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    denied: int = 0
    over: bool = False
    _calls: list[Call] = field(default_factory=list)
    _told: bool = False
    _news: "Future[None] | None" = None
    _timer: asyncio.TimerHandle | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def base_url(self) -> str:
        """The address that a client of the dialogue uses."""
        return f"{self.root}/d/{self.name}.{self.secret}/v1"

    def news(self) -> "Future[None]":
        """Return a future that is done when requests have come, or when :meth:`tell` was called."""
        with self._lock:
            self._news = Future()
            if self._told:
                self._news.set_result(None)
            return self._news

    def take(self) -> list[Call]:
        """Return the requests that have come since the last call of this."""
        with self._lock:
            calls, self._calls, self._told = self._calls, [], False
        return calls

    def take_reports(self) -> list[Report]:
        """Return the rewards that were reported since the last call of this."""
        reports = []
        while self.reports:  # the server's thread may add others meanwhile
            reports.append(self.reports.pop(0))
        return reports

    def put_back(self, calls: Sequence[Call], seconds: float | None) -> None:
        """Put back requests that are not taken yet, to be looked at with the next ones, or after ``seconds``.

        None: they are not news. 0: they are news at once.
        """
        with self._lock:
            self._calls = [*calls, *self._calls]
        for call in calls[:1]:
            if seconds is not None:
                call.loop.call_soon_threadsafe(call.loop.call_later, seconds, self.tell)

    def tell(self) -> None:
        """Let whoever waits for :meth:`news` look."""
        with self._lock:
            self._told = True
            if self._news is not None:
                with contextlib.suppress(InvalidStateError):
                    self._news.set_result(None)

    def put(self, call: Call) -> None:
        """Add a request, in the server's thread.

        Raises:
            Refused: the dialogue is over.
        """
        with self._lock:
            if self.over:
                raise Refused("the dialogue is over", status=410, code="dialogue_over")
            self._calls.append(call)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = call.loop.call_later(SETTLE, self.tell)

    def count(self, code: str, why: str) -> None:
        """Count a refused request, unless it came after the dialogue."""
        if code != "dialogue_over":
            self.denied += 1
            self.refused += why.splitlines()

    def close(self) -> None:
        """Refuse what still waits, and all that comes."""
        with self._lock:
            self.over = True
            calls, self._calls = self._calls, []
        for call in calls:
            call.refuse(Refused("the dialogue is over", status=410, code="dialogue_over"))


class Gateway:
    """The server. It is started when it is first used, and ends with the process.

    Raises:
        ConfigError: the packages of a server are not installed.
    """

    def __init__(self) -> None:
        try:
            from maporl.guard.connections import guarded_server
        except ImportError:
            raise ConfigError(
                f"protocol program: the program's client needs a server: {install_command('server')}"
            ) from None
        self._sessions: dict[str, Session] = {}
        self._number = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        # asyncio sets this for sockets that name TCP, which this one does not; without it the body of each reply waits
        # 40 ms, until the client has acknowledged the head
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes, budget = self._app(), Budget(LIMITS.held)
        forms: tuple[Form, ...] = (Refused.body, anthropic.error)
        guards = {
            form: Guard(routes, LIMITS, Door(self._enter, _error_in(form), self._count, _log), budget) for form in forms
        }

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await guards[_form(scope["path"])](scope, receive, send)

        # what ends a connection before its path has come is told in OpenAI's form
        self._server = guarded_server(app, LIMITS, _error_in(Refused.body), log_level="error", lifespan="off")
        serve = self._server.serve([self._socket])
        threading.Thread(target=asyncio.run, args=(serve,), name="programs' server", daemon=True).start()
        while not self._server.started:
            pause(0.01)

    def open(self, agents: Sequence[str], ignored: Sequence[str] = ()) -> Session:
        """Open a dialogue."""
        self._number += 1
        session = Session(f"{self._number}", secrets.token_urlsafe(24), self.root, tuple(agents), tuple(ignored))
        self._sessions[session.name] = session
        return session

    def close(self, session: Session) -> None:
        """Close a dialogue. Requests that still come for it are refused."""
        session.close()
        self._sessions.pop(session.name, None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _app(self) -> Any:
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route, Router

        def answered(handle: Callable[[Session, Request], Any]) -> Callable[[Request], Any]:
            async def endpoint(request: Request) -> Response:
                session: Session = request.scope["session"]
                try:
                    return await handle(session, request)
                except Refused as error:
                    refused = error
                except Exception:
                    logger.exception("a request of a program failed; this is an error of maporl")
                    refused = Refused("maporl failed at this request; its log says why", status=500, code="internal")
                session.count(refused.code, refused.message)
                # asked again, it would be refused again; clients would ask, where there are too many calls
                body = _form(request.scope["path"])(refused)
                return JSONResponse(body, refused.status, {"x-should-retry": "false"})

            return endpoint

        def replies(read: Reader, whole: Writer, pieces: Writer, prefix: str) -> Callable[[Session, Request], Any]:
            async def handle(session: Session, request: Request) -> Response:
                body = await _json(request)
                asked = with_headers(read(body, session.agents, session.ignored), request.headers)
                loop = asyncio.get_running_loop()
                call = Call(asked, loop, loop.create_future())
                session.put(call)
                first, *others = await call.done
                name, created = f"{prefix}{session.name}-{first.id}", int(time.time())
                if not asked.stream:
                    return JSONResponse(whole(first, asked, name, created, *others))
                return StreamingResponse(
                    _events(pieces(first, asked, name, created, *others)), media_type="text/event-stream"
                )

            return handle

        chat = replies(read_chat, completion, chunks, "chatcmpl-")
        respond = replies(responses.read_response, responses.response, responses.events, "resp_")
        send = replies(anthropic.read_message, anthropic.message, anthropic.events, "msg_")

        async def count(session: Session, request: Request) -> Response:
            raise Refused(anthropic.UNCOUNTED, status=404, code="not_found")

        async def models(session: Session, request: Request) -> Response:
            entries = [{"id": agent, "object": "model", "created": 0, "owned_by": "maporl"} for agent in session.agents]
            return JSONResponse({"object": "list", "data": entries})

        async def reward(session: Session, request: Request) -> Response:
            body = await _json(request)
            session.reports.extend(_reports(body, session.agents))
            return JSONResponse({"ok": True})

        async def elsewhere(session: Session, request: Request) -> Response:
            what = f"{request.method} /{request.path_params.get('rest', '')}"
            known = "POST /chat/completions, POST /responses, POST /messages, POST /reward or GET /models"
            raise Refused(f"{what}: expected {known}", status=404, code="not_found")

        at = "/d/{token}/v1"
        return Router(
            routes=[
                Route(f"{at}/chat/completions", answered(chat), methods=["POST"]),
                Route(f"{at}/responses", answered(respond), methods=["POST"]),
                *[
                    Route(f"{at}{more}/messages{path}", answered(handle), methods=["POST"])
                    for more in ("", "/v1")  # Anthropic's clients add /v1 to the address that they are given
                    for path, handle in (("", send), ("/count_tokens", count))
                ],
                Route(f"{at}/models", answered(models), methods=["GET"]),
                Route(f"{at}/reward", answered(reward), methods=["POST"]),
                *[
                    Route(path, answered(elsewhere), methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
                    for path in (f"{at}/{{rest:path}}", "/d/{token}/{rest:path}", "/d/{token}")
                ],
            ]
        )

    def _enter(self, scope: Any, headers: Any) -> None:
        """Check a request by its head: it must name this machine, and a dialogue with its secret."""
        check_host(headers)
        name, _, secret = (*scope["path"].split("/", 3), "", "")[2].partition(".")
        session = self._sessions.get(name)
        if session is None or not hmac.compare_digest(session.secret.encode(), secret.encode()):
            why = "the dialogue is over, or the address is not one of this run"
            raise Denied(410, "dialogue_over", why, ((b"x-should-retry", b"false"),))
        scope["session"] = session

    def _count(self, scope: Any, denied: Denied) -> None:
        if "session" in scope:
            scope["session"].count(denied.code, denied.text)


async def _events(pieces: Iterable[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield the pieces of a stream as server-sent events. Those of a response have names, and it ends with the last."""
    for piece in pieces:
        named = f"event: {piece['type']}\n" if "type" in piece else ""
        yield f"{named}data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    if not named:
        yield "data: [DONE]\n\n"


async def _json(request: Any) -> Any:
    """Return the JSON of a request."""
    try:
        return read_json(await request.body())
    except ValueError as error:
        raise Refused(f"the request is not JSON that can be read: {error}", code="invalid_json") from None


def _form(path: str) -> Form:
    """Return how an error is written in answer to a request to ``path``."""
    return anthropic.error if "messages" in path.split("/")[3:6] else Refused.body


def _error_in(form: Form) -> Callable[[int, str, str], bytes]:
    return lambda status, code, text: json.dumps(form(Refused(text, status=status, code=code))).encode()


def _log(method: str, path: str, status: int, seconds: float) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    _, _, dialogue, *rest = (*path.split("/"), "", "")
    where = f"dialogue {dialogue.partition('.')[0]}: {method} /{'/'.join(filter(None, rest))}"
    logger.debug("%s: %s in %.0f ms", where, status or "client gone", 1000 * seconds)


def _reports(body: Any, agents: Sequence[str]) -> list[Report]:
    """Return the rewards in ``{"reward": 1.0}``, ``{"reward": 1.0, "agent": NAME}`` or ``{"rewards": {NAME: 1.0}}``."""
    body = body if isinstance(body, dict) else {}
    rewards = body.get("rewards")
    pairs = list(rewards.items()) if isinstance(rewards, dict) else [(body.get("agent"), body.get("reward"))]
    for agent, value in pairs:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (agent is not None and agent not in agents):
            raise Refused(
                f'reward: expected {{"reward": 1.0}}, with "agent" as one of {list(agents)} or without it, got '
                f"{json.dumps(body)[:80]}",
                "reward",
            )
    return [Report(float(value), agent) for agent, value in pairs]


_GATEWAYS: dict[int, Gateway] = {}
_LOCK = threading.Lock()


def gateway() -> Gateway:
    """Return the server of this process. A forked process gets its own."""
    with _LOCK:
        if os.getpid() not in _GATEWAYS:
            _GATEWAYS[os.getpid()] = Gateway()
        return _GATEWAYS[os.getpid()]
