"""A connection to one server that speaks the Model Context Protocol (MCP). Imports no torch.

It works with the versions 1.30 and 2 of the package ``mcp``, which give the same things different names.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from maporl.environments.rooms import LARGEST
from maporl.errors import ConfigError, UserError, install_command
from maporl.event_loop import CONNECTIONS, inside, wait
from maporl.hosts import check_address, proxy_of
from maporl.types import Result
from trl_ext.ppo.options import option, options

ENDED = (-32000, -32600, 32600)
"""The codes of JSON-RPC with which the package tells that a connection or a session has ended.

Servers use them for errors of their own, too.
"""
_PATIENCE = 10.0
"""Between updates a server has so many seconds to answer. Then it is started again."""
MOST_TOOLS = 10_000
"""Most tools of a server, and most pages of its list."""
_CLOSING = 10.0
"""A server has so many seconds to end. The package kills its process after four."""


class ServerGone(UserError, RuntimeError):
    """A server of tools does not start, or cannot be reached. The message names its command or its address."""


@options(frozen=True)
class ServerOptions:
    """How a server is started or reached.

    Raises:
        ConfigError: neither or both of ``command`` and ``url`` are given, the program does not exist, a variable is not
            set, or ``url`` is on another machine without ``network``.
    """

    command: Sequence[str] | None = option(
        None,
        "The program and its arguments, for a server that talks through its standard input and output. It is not "
        "given to a shell.",
    )
    url: str | None = option(None, "Address of a server that is running already.")
    env: Sequence[str] = option(
        (), "Names of environment variables that the program gets besides `PATH`. It gets no others."
    )
    network: bool = option(False, "True: `url` may be on another machine.")
    only: Sequence[str] | None = option(None, "Names of the tools that are used. None: all.")
    start_seconds: float = option(60.0, "Most seconds of starting it and asking for its tools.")

    def __post_init__(self):
        if (self.command is None) == (self.url is None):
            raise ConfigError("mcp: expected either command, as [docs-server, --stdio], or url; give one of them")
        for name in ("env", "only"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence | None):
                raise ConfigError(f"mcp: {name}: expected a list of names, got {value!r:.80}")
        if self.command is not None:
            self._check_command()
        else:
            self._check_url()

    def _check_command(self) -> None:
        if (
            not isinstance(self.command, list | tuple)
            or not self.command
            or not all(isinstance(w, str) for w in self.command)
        ):
            raise ConfigError(
                f"mcp: command: expected a list of texts, as [docs-server, --stdio], got {self.command!r:.80}"
            )
        if shutil.which(self.command[0]) is None:
            raise ConfigError(f"mcp: command: no program {self.command[0]!r:.80}; install it, or give its path")
        if self.network:
            raise ConfigError("mcp: network: it goes with url; a program is not held back from the network; remove it")
        for name in self.env:
            if name not in os.environ:
                raise ConfigError(f"mcp: env: the variable {name!r:.80} is not set; set it, or remove it from env")

    def _check_url(self) -> None:
        if self.env:
            raise ConfigError("mcp: env: it goes with command; a server at an address has its own variables; remove it")
        check_address("mcp", self.url, self.network)

    @property
    def where(self) -> str:
        """The command line or the address, for messages."""
        if self.command is None:
            from maporl.http_client import through  # slow to import, and only servers at addresses need it

            return f"the MCP server {self.url!r:.200}{through(proxy_of(str(self.url)))}"
        return f"the MCP server {' '.join(self.command)!r:.200}"


class Server:
    """The connection to one server. All connections live in the event loop of the adapters.

    Args:
        options: how it is started or reached.

    Raises:
        ConfigError: the package ``mcp`` is not installed.
    """

    def __init__(self, options: ServerOptions):
        _package()
        self.options = options
        self.alive = False
        """Whether it answers. It becomes False when a call finds the connection ended."""
        self._session: Any = None
        self._keeper: asyncio.Task | None = None
        self._leave: asyncio.Event | None = None
        self._log: Any = None

    def start(self) -> None:
        """Start or reach the server.

        Raises:
            ServerGone: it did not answer in ``start_seconds``, or ended. The message has the last line that it wrote.
        """
        self._session = None
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # it is open for as long as the server runs
        try:
            wait(self._start(), self.options.start_seconds, CONNECTIONS)
        except Exception as error:
            why = (
                f"no answer within {self.options.start_seconds:g} s"
                if isinstance(error, TimeoutError)
                else _told(error)
            )
            last = self._last_line()
            self.close()
            raise ServerGone(
                f"{self.options.where} does not start: {why}{f'; it wrote: {last}' if last else ''}"
            ) from None

    async def _start(self) -> None:
        self._leave = asyncio.Event()
        ready = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(ready))
        await asyncio.wait({self._keeper, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._keeper  # it raises what went wrong
            raise ConnectionError("the connection ended")
        self._session, self.alive = ready.result(), True

    async def _keep(self, ready: asyncio.Future) -> None:
        """Hold the connection. What is entered in a task must be left in the same task."""
        package = _package()
        async with contextlib.AsyncExitStack() as stack:
            streams = await stack.enter_async_context(_transport(package, self.options, self._log))
            session = await stack.enter_async_context(package.ClientSession(streams[0], streams[1]))
            await session.initialize()
            ready.set_result(session)
            assert self._leave is not None
            await self._leave.wait()

    def tools(self) -> list[Any]:
        """Return the tools that the server lists, as its package has them.

        Raises:
            ServerGone: it does not answer.
        """
        try:
            return wait(self._listed(), self.options.start_seconds, CONNECTIONS)
        except Exception as error:
            raise ServerGone(f"{self.options.where} does not list its tools: {_told(error)}") from None

    def answers(self) -> bool:
        """Return whether the server is still there. One that hangs for ten seconds counts as gone."""
        try:
            self.alive = self.alive and wait(self._still_there(), _PATIENCE, CONNECTIONS)
        except TimeoutError:
            self.alive = False
        return self.alive

    async def _still_there(self) -> bool:
        try:
            await self._watched(self._session.send_ping())
        except Exception as error:
            return not _ended(error)
        return True

    async def _listed(self) -> list[Any]:
        tools: list[Any] = []
        cursor, seen = None, set[str]()
        while True:
            page = await self._watched(self._session.list_tools(**({} if cursor is None else _cursor(cursor))))
            tools += page.tools
            cursor = getattr(page, "nextCursor", None) or getattr(page, "next_cursor", None)
            if not cursor:
                return tools
            if cursor in seen or len(tools) > MOST_TOOLS or len(seen) > MOST_TOOLS:
                raise ValueError(f"its list does not end: {len(tools)} tools in {len(seen) + 1} pages")
            seen.add(cursor)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """Call a tool.

        The result has ``error`` if the tool failed, the server has died, or it answered something else than text or
        something that the package refuses. Only what ends the connection ends the other calls.
        """
        if not self.alive:
            return Result("its server has died", error="raised")
        try:
            return _result(await inside(self._watched(self._session.call_tool(name, dict(arguments))), CONNECTIONS))
        except Exception as error:
            if _ended(error) and not await inside(self._still_there(), CONNECTIONS):
                self.alive = False
                return Result("its server has died", error="raised")
            return Result(_told(error), error="raised")

    async def _watched(self, answer: Any) -> Any:
        """Return the answer to a request, or raise if the connection ends before it comes."""
        task = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({task, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise ConnectionError("the connection ended")
        return task.result()

    def trim_log(self) -> None:
        """Forget what the server wrote to its standard error so far."""
        if self._log is not None:
            self._log.truncate(0)

    def close(self) -> None:
        """End the connection, and the process if there is one."""
        self.alive = False
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            with contextlib.suppress(TimeoutError):
                wait(self._left(keeper), _CLOSING, CONNECTIONS)
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _left(self, keeper: asyncio.Task) -> None:
        assert self._leave is not None
        if self._session is None:
            keeper.cancel()
        self._leave.set()
        await asyncio.wait({keeper})
        if not keeper.cancelled():
            keeper.exception()  # what a connection raises when it ends is of no interest now

    def _last_line(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _package() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError(
            f"mcp: it needs the package mcp ({error}); install it with: {install_command('mcp')}"
        ) from None
    return mcp


@contextlib.asynccontextmanager
async def _transport(package: Any, options: ServerOptions, log: Any) -> AsyncIterator[Any]:
    if options.command is None:
        from mcp.client import streamable_http

        from maporl.http_client import certificates

        proxy = proxy_of(str(options.url))
        default = streamable_http.create_mcp_http_client()  # version 1 has another kind of client than version 2
        kind = type(default)
        await default.aclose()
        how: dict[str, Any] = {
            "timeout": default.timeout,
            "follow_redirects": default.follow_redirects,
            "verify": certificates(),
        }
        async with (
            kind(**how, proxy=proxy, trust_env=False) as client,
            streamable_http.streamable_http_client(str(options.url), http_client=client) as streams,
        ):
            yield streams
        return
    from mcp.client.stdio import get_default_environment

    # the package adds variables of its own choice, and env takes them away again
    variables = {"PATH", *options.env}
    drop = [part for name in get_default_environment() if name not in variables for part in ("-u", name)]
    parameters = package.StdioServerParameters(
        command="env", args=[*drop, *options.command], env={n: os.environ[n] for n in variables if n in os.environ}
    )
    async with package.stdio_client(parameters, errlog=log) as streams:
        yield streams


def _cursor(cursor: str) -> dict[str, Any]:
    from mcp.types import PaginatedRequestParams

    return {"params": PaginatedRequestParams(cursor=cursor)}


def either(value: Any, first: str, second: str) -> Any:
    """Return the field ``first`` of version 1, or else the field ``second`` of version 2."""
    return getattr(value, first) if hasattr(value, first) else getattr(value, second)


def _ended(error: Exception) -> bool:
    """Return whether an error may be the end of the connection. All others are of one call, whose answer is refused."""
    import anyio

    closed = ConnectionError | anyio.ClosedResourceError | anyio.BrokenResourceError | anyio.EndOfStream
    return isinstance(error, closed) or getattr(getattr(error, "error", None), "code", None) in ENDED


def _result(answer: Any) -> Result:
    """Return what a tool answered as text. Pictures and sound are named beside it, and refused alone."""
    texts = [_text(part) for part in answer.content]
    other = [part.type for part, text in zip(answer.content, texts, strict=True) if text is None]
    if other and len(other) == len(texts):
        return Result(f"it returned content of the type {other[0]!r}; only text can be shown", error="raised")
    lines = [
        f"[{part.type}: only text can be shown]" if text is None else text
        for part, text in zip(answer.content, texts, strict=True)
    ]
    text = "\n".join(lines)
    structured = either(answer, "structuredContent", "structured_content")
    if structured is not None:
        written = json.dumps(structured, ensure_ascii=False)
        text = text if answer.content else written
        structured = structured if len(written) <= LARGEST else None  # a record would hold all of it
    elif not answer.content:
        text = "done"
    return Result(text, value=structured, error="raised" if either(answer, "isError", "is_error") else None)


def _text(part: Any) -> str | None:
    """Return the text of a part of an answer, that of a file included, or None if it has other content."""
    if part.type == "resource":
        return getattr(part.resource, "text", None)
    if part.type == "resource_link":
        words = " ".join(str(word) for word in (part.name, part.description) if word)
        return f"{words}: {part.uri}" if words else str(part.uri)
    return part.text if part.type == "text" else None


def _told(error: BaseException) -> str:
    """Return what went wrong in one line. A group of errors is told by its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(": ")[:300]
