"""An HTTP client for JSON from untrusted servers. Imports no torch.

A whole exchange has one deadline, from connecting to the last byte, so that a server cannot hold a run by sending a
byte a second. The answer is bounded in bytes and never decompressed. Redirects are not followed, so that a key is sent
to no other server. Messages show the beginning of an answer in printable characters, and never the key.
"""

import asyncio
import email.utils
import functools
import json
import math
import reprlib
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import tenacity

from maporl.errors import ConfigError, UserError
from maporl.event_loop import HTTP, event_loop
from maporl.hosts import proxy_of
from maporl.text import visible
from trl_ext.process.waits import pause

MOST_BYTES = 16 * 2**20
"""The most bytes of an answer. An answer of 32,000 tokens with their log-probabilities has about a quarter of that."""
LONGEST_PAUSE = 60.0
"""The most seconds that a server's ``Retry-After`` is waited for."""
BACKOFF = tenacity.wait_random_exponential(multiplier=0.5, max=10)
"""The pause before another try, in seconds."""
_GRACE_SECONDS = 30.0
"""An exchange ends by its own deadline. It is left alone this much later, if a connection cannot even be closed."""
_SHOWN = 200
"""The number of characters of an answer that messages show."""
_REPR = reprlib.Repr()  # does not go deep into nested values
_REPR.maxstring = _REPR.maxother = _SHOWN
_SHORTEST_SECRET = 8
"""A shorter key, such as the ``none`` of servers without keys, may be a word of a message."""

Read = TypeVar("Read")


class HttpFailure(UserError, RuntimeError):
    """A server gave no usable answer. The message does not name the server, because its callers do.

    Args:
        message: what came instead.
        passing: whether another try may be answered.
        retry_after: the seconds that a busy server asks to be given, else 0.
        status: the status of an answer that is an error, else 0.
        content: the body of that answer, which nobody has checked.
    """

    def __init__(
        self,
        message: str,
        passing: bool = False,
        retry_after: float = 0.0,
        status: int = 0,
        content: bytes = b"",
    ):
        super().__init__(message)
        self.passing, self.retry_after, self.status, self.content = passing, retry_after, status, content


def unchanged(found: Any) -> Any:
    """Return ``found``: the answer of a request whose caller reads it later."""
    return found


class HttpClient:
    """Asks the server at ``url``. Several threads may use it at once.

    It goes through the proxy that the environment names for ``url``, if there is one (:func:`maporl.hosts.proxy_of`).

    Args:
        url: the address that all paths are appended to. A user and a password in it are sent, and never shown.
        seconds: the time for a whole exchange.
        key: the bearer token, or an empty text.
        key_variable: the environment variable that ``key`` is from, for errors.

    Raises:
        ConfigError: ``url`` is not the address of a server, ``key`` has characters that no header may have, or the
            proxy cannot be used.
    """

    def __init__(self, url: str, seconds: float, key: str = "", key_variable: str = ""):
        self.seconds = seconds
        key = key.strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"the environment variable {key_variable} holds no key: expected printable ASCII letters")
        try:
            address = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"expected http://HOST:PORT, got {shown_url(url)!r}: {error}") from None
        self._secrets = [word for word in (key, address.password) if len(word) >= _SHORTEST_SECRET]
        login = (address.username, address.password) if address.userinfo else None
        self._address = str(address.copy_with(username=None, password=None)).rstrip("/")
        self.url = shown_url(url).rstrip("/")
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._loop = event_loop(HTTP)
        proxy = proxy_of(self._address)
        self._through = through(proxy)
        self._secrets += [word for word in (urlsplit(proxy or "").password,) if word and len(word) >= _SHORTEST_SECRET]
        try:
            self._client = httpx2.AsyncClient(
                verify=certificates(),
                timeout=None,  # the deadline is that of the whole exchange
                headers=headers,
                auth=login,
                follow_redirects=False,
                limits=httpx2.Limits(max_connections=None),  # callers bound them; time in a queue would count
                proxy=proxy,
                trust_env=False,  # what it would read of the environment is given
            )
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            if proxy is None:
                raise
            raise ConfigError(f"{self.url}: cannot be asked{self._through}: {error}") from None

    def get(self, path: str, read: Callable[[Any], Read] = unchanged) -> Read:
        """Return what ``read`` makes of the JSON value at ``path``. It raises what :meth:`post` raises."""
        return read(self._json(self._answer("GET", path, None)))

    def post(self, path: str, body: dict[str, Any], read: Callable[[Any], Read] = unchanged) -> Read:
        """Post ``body`` and return what ``read`` makes of the JSON value that is answered.

        Raises:
            HttpFailure: the server cannot be reached, does not answer in time, answers something else than JSON, or
                ``read`` refuses its answer.
        """
        return read(self._json(self._answer("POST", path, body)))

    def tell(self, path: str, body: dict[str, Any]) -> None:
        """Post ``body`` to a server whose answer need not be JSON.

        Raises:
            HttpFailure: the server cannot be reached, does not answer in time, or refuses.
        """
        self._answer("POST", path, body)

    def shown(self, content: Any) -> str:
        """Return the beginning of ``content``, of bytes, text or JSON values, as one printable line without the key."""
        if isinstance(content, bytes):
            content = content.decode("utf-8", "replace")
        text = content if isinstance(content, str) else _REPR.repr(content)
        for secret in self._secrets:
            text = text.replace(secret, "[the key]")
        text = " ".join(visible(text[: 4 * _SHOWN]).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

    # -- one exchange ---------------------------------------------------------------------------------------------

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        """Return the content of the answer, whose status is 200."""
        through = self._through
        try:
            exchange = self._exchange(method, path, body)
            status, headers, content = self._loop.wait(exchange, self.seconds + _GRACE_SECONDS)
        except TimeoutError:
            raise HttpFailure(
                f"no whole answer within {self.seconds:g} s{through}; raise its 'timeout', or look at the server",
                passing=True,
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            unreached = isinstance(error, httpx2.ConnectError | httpx2.ProxyError)
            what = "cannot be reached" if unreached else "did not end its answer"
            told = self.shown(str(error))
            raise HttpFailure(f"{what}{through} ({type(error).__name__}{told and ': '}{told})", passing=True) from None
        if status == 200:
            return content
        after = seconds_of(headers.get("retry-after", ""))
        passing = status in (408, 429) or status >= 500
        told = self._reason(content)
        if 300 <= status < 400:
            there = self.shown(headers.get("location", "nowhere"))
            told = f", a redirect to {there}; redirects are not followed: give that address"
        raise HttpFailure(f"answered {status}{through}{told}", passing, after if passing else 0.0, status, content)

    async def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any, bytes]:
        # escaped, so that lone surrogates are sent too
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self.seconds),
            self._client.stream(method, self._address + path, content=data, headers=kind) as answer,
        ):
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise HttpFailure(f"answered compressed ({self.shown(encoding)}), which was not asked for")
            content = bytearray()
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > MOST_BYTES:
                    raise HttpFailure(f"answered with more than {MOST_BYTES:,} bytes: {self.shown(bytes(content))!r}")
            return answer.status_code, answer.headers, bytes(content)

    def _json(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise HttpFailure(
                f"answered{self._through} with something that is not JSON: {self.shown(content)!r}", passing=True
            ) from None

    def _reason(self, content: bytes) -> str:
        """Return the error in the body of an answer, or else the beginning of the body."""
        try:
            error = json.loads(content)["error"]
            field = f" at {error['field']}" if error.get("field") else ""
            return f" ({self.shown(str(error['code']) + field + ': ' + str(error['message']))})"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f" ({self.shown(content)!r})" if content else ""


def seconds_of(retry_after: str) -> float:
    """Return the seconds that a ``Retry-After`` header asks for, from 0 to :data:`LONGEST_PAUSE`.

    The header has seconds, or a date of RFC 9110. Anything else is 0.

    >>> seconds_of("1.5"), seconds_of("99999999999"), seconds_of("-3"), seconds_of("nan"), seconds_of("soon")
    (1.5, 60.0, 0.0, 0.0, 0.0)
    """
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            date = email.utils.parsedate_tz(retry_after)
            seconds = 0.0 if date is None else email.utils.mktime_tz(date) - time.time()
        except (ValueError, TypeError, IndexError, OverflowError):
            seconds = 0.0
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_PAUSE)


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds until the next try: the backoff, and at least what the server asked for."""
    error = state.outcome.exception() if state.outcome else None
    return max(getattr(error, "retry_after", 0.0), BACKOFF(state))


def persistent(retries: int | None, note: Callable[[tenacity.RetryCallState], None] | None = None) -> tenacity.Retrying:
    """Return what calls a function again, up to ``retries`` times, after failures that may pass. None: for ever.

    Such a failure has a true attribute ``passing``, as :class:`HttpFailure` may have, and perhaps ``retry_after``.
    ``note`` hears of each before the pause that follows it.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: getattr(error, "passing", False)),
        stop=tenacity.stop_never if retries is None else tenacity.stop_after_attempt(retries + 1),
        wait=_pause,
        sleep=pause,
        before_sleep=note,
        reraise=True,
    )


def shown_url(url: str) -> str:
    """Return ``url`` without the user and the password in it, in printable characters.

    >>> shown_url("https://alice:s3cr3t@host:8000/v1")
    'https://host:8000/v1'
    """
    scheme, separator, rest = url.rpartition("://")
    place, slash, path = rest.partition("/")
    return visible(f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}")


def through(proxy: str | None) -> str:
    """Return the words of errors for a request that went through ``proxy``, which may have caused them.

    >>> through("http://alice:s3cr3t@proxy:3128"), through(None)
    (' through the proxy http://proxy:3128 of the environment (NO_PROXY names hosts that are reached without it)', '')
    """
    if proxy is None:
        return ""
    return (
        f" through the proxy {shown_url(proxy)} of the environment (NO_PROXY names hosts that are reached without it)"
    )


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return the certificates that servers are checked against. Reading them takes a tenth of a second."""
    return httpx2.create_ssl_context()
