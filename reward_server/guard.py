"""The checks that every request must pass before it is read: token, size and time. An ASGI middleware."""

import asyncio
import hmac
import json
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maporl.hosts import host_of, is_loopback
from reward_server.options import ServerOptions
from reward_server.telemetry import Telemetry

RETRY = (b"retry-after", b"1")
OPEN = frozenset({"/health", "/ready"})
"""The paths that need no token, because supervisors ask for them."""


class ClientGone(Exception):
    """The client closed its connection before it had sent its whole request."""


class Budget:
    """The bytes that all requests in progress may hold together."""

    def __init__(self, most: int):
        self.most, self.held = most, 0

    def take(self, size: int) -> bool:
        """Hold ``size`` bytes more, and return True. If that would be too many, hold none and return False."""
        if self.held + size > self.most:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """Hold ``size`` bytes less."""
        self.held -= size


class Guard:
    """Refuses requests that must not be read, and counts all requests.

    They lack the token (401), ask for another host (403), are too large (413) or too slow (408), or come when the
    requests in progress already fill the ``budget`` (429).
    """

    def __init__(
        self, app: ASGIApp, options: ServerOptions, telemetry: Telemetry, paths: Collection[str], budget: Budget
    ):
        self.app, self.options, self.telemetry, self.paths = app, options, telemetry, frozenset(paths)
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, count)
        except ClientGone:
            pass
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.telemetry.request(path, status, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not await self._knows_host(headers.get(b"host"), send):
            return
        if not self._may_enter(scope["path"], headers.get(b"authorization", b"")):
            challenge = [(b"www-authenticate", b"Bearer")]
            await refuse(
                send, 401, "unauthorized", "expected 'Authorization: Bearer TOKEN' with this server's token", challenge
            )
            return
        most = self.options.body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > most:
            await self._too_large(send)
            return
        body = bytearray()
        try:
            if await self._has_arrived(receive, body, send):
                await self._answer(scope, receive, send, bytes(body))
        finally:
            self.budget.give(len(body))

    async def _has_arrived(self, receive: Receive, body: bytearray, send: Send) -> bool:
        try:
            status = await asyncio.wait_for(self._read(receive, body), self.options.body_seconds)
        except TimeoutError:
            await refuse(send, 408, "too_slow", f"the request did not arrive within {self.options.body_seconds:g} s")
            return False
        if status == 413:
            await self._too_large(send)
        elif status == 429:
            await refuse(send, 429, "too_busy", "other requests fill the server's memory; try again", [RETRY])
        return status == 200

    async def _read(self, receive: Receive, body: bytearray) -> int:
        """Append the body to ``body``, taking its bytes from the budget. Return 200, or the status of a refusal."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if len(body) + len(part) > self.options.body_bytes:
                return 413
            if not self.budget.take(len(part)):
                return 429
            body += part
            more = message.get("more_body", False)
        return 200

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()  # this tells when the client has gone
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _may_enter(self, path: str, authorization: bytes) -> bool:
        token = self.options.token
        if token is None or path in OPEN:
            return True
        scheme, _, sent = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), token.encode())

    async def _knows_host(self, header: bytes | None, send: Send) -> bool:
        """Return whether the request may come from here."""
        # A server without a token trusts this machine. A website can make its own name point to this machine, and a
        # browser then sends the site's requests here, with the site's name as Host.
        if self.options.token is not None or header is None:  # HTTP/1.0 may name no host, and browsers always do
            return True
        host = host_of(header.decode("latin-1"))
        if host is None:
            await refuse(send, 400, "malformed_host", "expected a host and a port in the header Host")
            return False
        if is_loopback(host):
            return True
        await refuse(send, 403, "other_host", "this server answers requests to localhost only; or give it a token")
        return False

    async def _too_large(self, send: Send) -> None:
        most = self.options.body_bytes
        await refuse(send, 413, "too_large", f"the request has more than {most} bytes; send several smaller ones")


async def refuse(
    send: Send, status: int, code: str, text: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer a request with ``status`` and an error body, and close its connection."""
    body = error_body(code, text)
    fixed = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})


def error_body(code: str, text: str, field: str | None = None) -> bytes:
    """The JSON of an :class:`reward_server.schemas.ErrorBody`."""
    return json.dumps({"error": {"code": code, "message": text, "field": field}}).encode()
