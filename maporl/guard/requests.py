"""The checks that a request must pass before it is read: host, token, size and time. An ASGI middleware, no torch."""

import asyncio
import functools
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from maporl.guard.limits import Limits
from maporl.hosts import host_of, is_loopback
from maporl.text import well_formed_json
from trl_ext.chat.written_values import Unreadable, check_value

Scope = MutableMapping[str, Any]
Headers = Mapping[bytes, bytes]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
AGAIN = ((b"retry-after", b"1"),)
"""The header that says that the same request may be let in later."""


class Denied(Exception):
    """A request that is not read.

    Args:
        status: the HTTP status of its answer.
        code: a word for programs.
        text: what is wrong, and what to do.
        headers: further headers of the answer.
    """

    def __init__(self, status: int, code: str, text: str, headers: tuple[tuple[bytes, bytes], ...] = ()):
        super().__init__(text)
        self.status, self.code, self.text, self.headers = status, code, text, headers


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


def error_body(status: int, code: str, text: str, field: str | None = None) -> bytes:
    """Return an error as JSON, with the ``field`` of the request that is at fault."""
    return json.dumps({"error": {"code": code, "message": text, "field": field}}).encode()


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Door:
    """The decisions of a server about a request by its head.

    Args:
        enter: raises :class:`Denied` for a request that may not enter, given its scope and its headers.
        write_error: returns the body of an error's answer, from a status, a word for programs and a text.
        denied: is told of each request that is denied, with its scope.
        log: is told of each answered request: its method, path, status (0: the client had gone) and seconds. The path
            may hold a secret.
    """

    enter: Callable[[Scope, Headers], None]
    write_error: Callable[[int, str, str], bytes] = error_body
    denied: Callable[[Scope, Denied], None] = _nothing
    log: Callable[[str, str, int, float], None] = _nothing


class Guard:
    """Denies requests that must not be read, and lets the others in with their whole body.

    They may not enter (``door``), have too large a head (431) or body (413), come too slowly (408), or while those in
    progress fill the ``budget`` (429).
    """

    def __init__(self, app: App, limits: Limits, door: Door, budget: Budget | None = None):
        self.app, self.limits, self.door = app, limits, door
        self.budget = budget or Budget(limits.held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, body = time.perf_counter(), 0, bytearray()

        async def count(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._look(scope)
            await self._arrive(receive, body)
            await self.app(scope, _replayed(bytes(body), receive), count)
        except Denied as denied:
            self.door.denied(scope, denied)
            if denied.status == 413:
                await self._discard(receive)
            await self._deny(denied, count)
        except ClientGone:
            pass
        finally:
            self.budget.give(len(body))
            self.door.log(scope["method"], scope["path"], status, time.perf_counter() - started)

    def _look(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        if size + len(scope.get("query_string", b"")) > self.limits.head:
            raise Denied(431, "too_large", f"the head of the request has more than {self.limits.head} bytes")
        self.door.enter(scope, headers)
        if (connection := scope.get("state", {}).get("connection")) is not None:
            connection.let_in = True
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self.limits.body:
            raise self._too_large()

    async def _arrive(self, receive: Receive, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self.limits.seconds):
                await self._read(receive, body)
        except TimeoutError:
            why = f"the request did not arrive within {self.limits.seconds:g} s"
            raise Denied(408, "too_slow", why) from None

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Append the body to ``body``, taking its bytes from the budget."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if len(body) + len(part) > self.limits.body:
                raise self._too_large()
            if not self.budget.take(len(part)):
                raise Denied(429, "too_busy", "other requests fill the server's memory; try again", AGAIN)
            body += part
            more = message.get("more_body", False)

    async def _discard(self, receive: Receive) -> None:
        """Read what a client still sends, so that one that reads nothing before it has sent all hears why."""
        left = self.limits.body
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.seconds):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _too_large(self) -> Denied:
        why = f"the request has more than {self.limits.body} bytes; send several smaller ones"
        return Denied(413, "too_large", why)

    async def _deny(self, denied: Denied, send: Send) -> None:
        """Answer with an error, and close the connection: what it still sends is not read."""
        body = self.door.write_error(denied.status, denied.code, denied.text)
        size = str(len(body)).encode()
        fixed = [(b"content-type", b"application/json"), (b"content-length", size), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": denied.status, "headers": [*fixed, *denied.headers]})
        await send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
    replayed = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal replayed
        if replayed:
            return await receive()  # this tells when the client has gone
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def check_host(headers: Headers) -> None:
    """Check that a request names this machine as its ``Host``.

    A server that only this machine can reach trusts it. A website can make its own name point to this machine, and a
    browser then sends the site's requests here, with the site's name as Host.

    Raises:
        Denied: it names another one.
    """
    header = headers.get(b"host")
    if header is None:  # HTTP/1.0 may name no host, and browsers always do
        return
    host = _host(header)
    if host is None:
        raise Denied(400, "malformed_host", "expected a host and a port in the header Host")
    if not host:
        raise Denied(403, "other_host", "this server answers requests to localhost only; or give it a token")


@functools.lru_cache(maxsize=16)
def _host(header: bytes) -> bool | None:
    """Return whether a ``Host`` header names this machine. None: it is malformed."""
    host = host_of(header.decode("latin-1"))
    return None if host is None else is_loopback(host)


def check_token(headers: Headers, token: str) -> None:
    """Check that a request brings the ``token``.

    Raises:
        Denied: it does not.
    """
    scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(sent.strip(), token.encode()):
        why = "expected 'Authorization: Bearer TOKEN' with this server's token"
        raise Denied(401, "unauthorized", why, ((b"www-authenticate", b"Bearer"),))


def read_json(body: bytes | str) -> Any:
    """Return the JSON in a request's body, with U+FFFD in place of halves of characters in its texts.

    Raises:
        ValueError: it cannot be read as JSON, is nested too deep, or has a number that is not finite or larger than any
            double.
    """
    try:
        value = _JSON.decode(body if isinstance(body, str) else body.decode())
        check_value(value)
        return well_formed_json(value)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (Unreadable, OverflowError) as error:
        raise ValueError(str(error)) from None


def _integer(digits: str) -> int:
    number = int(digits)
    float(number)  # one of 400 digits overflows
    return number


_JSON = json.JSONDecoder(parse_int=_integer)
