"""The checks that every request must pass before it is read: token, size and time. An ASGI middleware."""

import asyncio
import hmac
import json
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_server.options import ServerOptions
from reward_server.telemetry import Telemetry

OPEN = frozenset({"/health", "/ready"})
"""The paths that need no token, because supervisors ask for them."""


class ClientGone(Exception):
    """The client closed its connection before it had sent its whole request."""


class Guard:
    """Refuses requests that lack the token (401), are too large (413) or too slow (408), and counts all requests."""

    def __init__(self, app: ASGIApp, options: ServerOptions, telemetry: Telemetry, paths: Collection[str]):
        self.app, self.options, self.telemetry, self.paths = app, options, telemetry, frozenset(paths)

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
        try:
            body = await asyncio.wait_for(_read(receive, most), self.options.body_seconds)
        except TimeoutError:
            await refuse(send, 408, "too_slow", f"the request did not arrive within {self.options.body_seconds:g} s")
            return
        if body is None:
            await self._too_large(send)
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()  # this tells when the client has gone
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _may_enter(self, path: str, given: bytes) -> bool:
        token = self.options.token
        if token is None or path in OPEN:
            return True
        scheme, _, sent = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), token.encode())

    async def _too_large(self, send: Send) -> None:
        most = self.options.body_bytes
        await refuse(send, 413, "too_large", f"the request has more than {most} bytes; send several smaller ones")


async def _read(receive: Receive, most: int) -> bytes | None:
    """The whole body, or None as soon as it is larger than ``most`` bytes."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body", False):
            return bytes(body)


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
