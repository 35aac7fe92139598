"""A server over HTTP/1.1 whose connections are counted, and end if nothing comes. Imports no torch."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from maporl.guard.limits import Limits
from maporl.guard.requests import error_body

logger = logging.getLogger(__name__)
ACCEPTED = 16
"""Connections that are accepted before the first of them is looked at."""
WAITING = 1024
"""Connections that the kernel keeps until they are accepted."""


class Connections:
    """The connections of a server.

    If there are too many, one is closed: the one that has been silent for longest among those whose requests were never
    let in, or else among those without a request. If all of them wait for answers, the newest is turned away.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.most = min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._held: dict[Any, None] = {}
        self._told = False

    def add(self, new: Any) -> None:
        """Hold a connection, and close one if there are too many, in all or from its address."""
        peers = [one for one in self._held if one.peer == new.peer] if new.peer not in ("127.0.0.1", "::1") else []
        self._held[new] = None
        if len(self._held) <= self.most and len(peers) < self.limits.by_peer:
            return
        if not self._told:
            self._told = True
            logger.warning(
                "more than %d connections at once, or %d from one address: idle ones are closed",
                self.most,
                self.limits.by_peer,
            )
        others = [one for one in (peers if len(peers) >= self.limits.by_peer else self._held) if one is not new]
        closed = min((one for one in others if not one.answering), key=lambda one: one.let_in, default=new)
        closed.end(503, "too_busy", "there are too many connections; try again")

    def heard(self, one: Any) -> None:
        """Note that something has come from a connection."""
        if one in self._held:
            self._held[one] = self._held.pop(one)

    def remove(self, one: Any) -> None:
        """Hold a connection no longer."""
        self._held.pop(one, None)


def guarded_server(
    app: Any, limits: Limits, write_error: Callable[[int, str, str], bytes] = error_body, **config: Any
) -> uvicorn.Server:
    """Return a server of an ASGI application that holds to ``limits``.

    Args:
        app: the application.
        limits: the bounds.
        write_error: returns the JSON with which a connection is answered that is closed, from a status, a word for
            programs and a text.
        config: further options of ``uvicorn.Config``.
    """
    kind = _protocol(Connections(limits), limits, write_error)
    options = {"ws": "none", "access_log": False, "server_header": False, "timeout_keep_alive": limits.idle, **config}
    return _Server(uvicorn.Config(app, http=kind, backlog=ACCEPTED, **options))


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts as many connections in one go as it lets the kernel keep: too many files at once
        for server in getattr(self, "servers", ()):
            for listening in server.sockets:
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(WAITING)


def _protocol(connections: Connections, limits: Limits, write_error: Callable[[int, str, str], bytes]) -> Any:
    """Return uvicorn's HTTP/1.1, which also counts connections and bounds the times and the sizes of heads."""

    class Guarded(_base()):  # type: ignore[misc]  # either of two
        peer, let_in, _late, _head = "", False, None, 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.app_state: dict[str, Any] = {**self.app_state, "connection": self}
            self.peer = self.client[0] if self.client else ""
            self._wait()
            connections.add(self)

        def data_received(self, data: bytes) -> None:
            connections.heard(self)
            before, body = self.cycle, self.cycle is not None and self.cycle.more_body
            super().data_received(data)
            if body or self.cycle is not before:  # it was of a body, or a whole head has come
                self._come()
                return
            self._head += len(data)
            self._wait()
            if self._head > limits.head:
                self.end(431, "too_large", f"the head of the request has more than {limits.head} bytes")

        def connection_lost(self, exc: Exception | None) -> None:
            self._come()
            connections.remove(self)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self.end(400, "malformed_request", "this is not a request of HTTP/1.1")

        @property
        def answering(self) -> bool:
            """Whether a request that was let in waits for its answer."""
            return self.let_in and self.cycle is not None and not self.cycle.response_complete

        def end(self, status: int, code: str, text: str) -> None:
            """Answer with an error, and close the connection."""
            if self.transport.is_closing():
                return
            body = write_error(status, code, text)
            head = f"HTTP/1.1 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            self.transport.close()

        def _wait(self) -> None:
            if self._late is None:
                text = f"the request's head did not arrive within {limits.seconds:g} s"
                self._late = self.loop.call_later(limits.seconds, self.end, 408, "too_slow", text)

        def _come(self) -> None:
            self._head = 0
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Guarded


def _base() -> Any:
    """Return the class of uvicorn's that reads HTTP: the one in C, if its package is installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return HttpToolsProtocol
