"""The server through which programs reach their agents: on loopback, in this process, with a token for each dialogue.

Data flow: a client -> :class:`Gateway` (server's thread) -> a call in the :class:`Session` of its dialogue, which the
protocol takes (driver's thread) and answers with what the agent has said.
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
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, ClassVar

from maporl.errors import ConfigError, install_command
from maporl.guard import Denied, Door, Limits, check_host
from maporl.serving.routes import METHODS, Call, answered, error_in, guarded, json_of, routes
from maporl.serving.wire import Refused
from trl_ext.process.waits import pause

logger = logging.getLogger(__name__)
SETTLE = 0.002
"""Seconds without another request after which those of a dialogue are asked, so that parallel ones come together."""
LIMITS = Limits()


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

    ignored_by: ClassVar[str] = "protocol.ignore"
    count_tokens: ClassVar[None] = None  # only whoever answers has the tokenizer

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
        app = guarded(self._app(), LIMITS, Door(self._enter, denied=self._count, log=_log))
        # what ends a connection before its path has come is told in OpenAI's form
        self._server = guarded_server(app, LIMITS, error_in(Refused.body), log_level="error", lifespan="off")
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
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route, Router

        async def reward(session: Session, request: Request) -> Response:
            body = await json_of(request)
            session.reports.extend(_reports(body, session.agents))
            return JSONResponse({"ok": True})

        async def elsewhere(session: Session, request: Request) -> Response:
            what = f"{request.method} /{request.path_params.get('rest', '')}"
            known = "POST /chat/completions, POST /responses, POST /messages, POST /reward or GET /models"
            raise Refused(f"{what}: expected {known}", status=404, code="not_found")

        at = "/d/{token}/v1"
        others = (f"{at}/{{rest:path}}", "/d/{token}/{rest:path}", "/d/{token}")
        return Router(
            routes=[
                *routes(at),
                Route(f"{at}/reward", answered(reward), methods=["POST"]),
                *[Route(path, answered(elsewhere), methods=METHODS) for path in others],
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
        scope["owner"] = session

    def _count(self, scope: Any, denied: Denied) -> None:
        if "owner" in scope:
            scope["owner"].count(denied.code, denied.text)


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
