"""Tools of servers that speak the Model Context Protocol (MCP), by their command line or over HTTP. Imports no torch.

It needs the package ``mcp``, version 1.30 or later (extra ``mcp``). A server's requests for sampling and elicitation
are refused by that package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from maporl.environments.arguments import ArgumentCheck
from maporl.environments.base import Environment, Tool, Toolbox, writable
from maporl.errors import ConfigError
from maporl.integrations.mcp_server import Server, ServerOptions, either
from maporl.text import cleaned, well_formed_json
from maporl.types import Result


class MCPTools(Toolbox):
    """The tools of one server, which all dialogues of a process share.

    A server that has died is started again before the next update. Until then calls return an error. The options are
    those of :class:`ServerOptions`.

    Raises:
        ConfigError: an option is wrong, the package ``mcp`` is not installed, a name in ``only`` is not a tool, or the
            schema of a tool is not valid (:class:`maporl.environments.schemas.BoundedSchema`).
        ServerGone: the server does not start.
    """

    def __init__(self, **options: Any):
        self._server = Server(_options(options))
        self._server.start()
        try:
            self._tools = _tools(self._server.tools(), self._server.options, lambda name: _caller(self._server, name))
        except BaseException:
            self._server.close()
            raise

    def tools(self) -> list[Tool]:
        """Return the tools."""
        return list(self._tools)

    def renew(self) -> None:
        """Start the server again if it has died.

        Raises:
            ServerGone: it does not start.
        """
        if self._server.answers():
            self._server.trim_log()
            return
        self._server.close()
        self._server.start()

    def close(self) -> None:
        """End the server."""
        self._server.close()


_LISTED: dict[str, list[Any]] = {}
"""What the server of each :class:`ServerOptions` lists, so that a process asks one server once."""


class MCPEnvironment(Environment):
    """The tools of a server that each dialogue has for itself, for servers that keep something between calls.

    Each dialogue starts a process of its own, or its own session with a server at an address. If the server dies, what
    it kept is gone, so the environment is lost. The options are those of :class:`ServerOptions`.

    Raises:
        ConfigError: an option is wrong, or the package ``mcp`` is not installed.
    """

    def __init__(self, **options: Any):
        self._server = Server(_options(options))

    def reset(self, seed: int, row: Mapping[str, Any]) -> None:
        """Start the server, if it does not run yet.

        Raises:
            ServerGone: it does not start.
        """
        if not self._server.alive:
            self._server.start()

    def tools(self, agent: str) -> list[Tool]:
        """Return the tools, which every agent has. The first instance starts its server to ask for them."""
        key = repr(self._server.options)
        if key not in _LISTED:
            self.reset(0, {})
            _LISTED[key] = self._server.tools()
        return _tools(_LISTED[key], self._server.options, self._caller)

    def can_pay(self, agents: Sequence[str]) -> bool:
        """Return False: the protocol knows no rewards."""
        return False

    def _caller(self, name: str) -> Callable[..., Any]:
        async def run(**arguments: Any) -> Result:
            result = await self._server.call(name, arguments)
            return result if self._server.alive else replace(result, error="lost")

        return run

    def close(self) -> None:
        """End the server."""
        self._server.close()


def _options(options: Mapping[str, Any]) -> ServerOptions:
    try:
        return ServerOptions(**options)
    except TypeError as error:
        names = ", ".join(ServerOptions.__dataclass_fields__)
        raise ConfigError(f"mcp: {str(error).split(') ')[-1]}; its options are {names}") from None


def _caller(server: Server, name: str) -> Callable[..., Any]:
    async def run(**arguments: Any) -> Result:
        return await server.call(name, arguments)

    return run


def _tools(listed: Sequence[Any], options: ServerOptions, run: Callable[[str], Callable[..., Any]]) -> list[Tool]:
    """Return the tools that a server lists, by names that models can write."""
    # version 1 of its package has other names for fields than version 2
    names = _names([tool.name for tool in listed])
    if missing := [name for name in options.only or () if name not in names and name not in names.values()]:
        shown = [*names][:MOST_NAMED]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        raise ConfigError(f"mcp: only: {options.where} has no tool {missing[0]!r:.80}; it has {', '.join(shown)}{more}")
    wanted = None if options.only is None else set(options.only)
    chosen = [tool for tool in listed if wanted is None or tool.name in wanted or names[tool.name] in wanted]
    return [_tool(tool, names[tool.name], run(tool.name), options) for tool in chosen]


MOST_NAMED = 30
"""Most names of tools in an error."""


def _names(listed: Sequence[str]) -> dict[str, str]:
    """Return a name that models can write for each of a server's tools: its own, wherever this can be."""
    by_listed = {name: name for name in listed if writable(name) == name}
    for name in listed:
        plain, number = writable(name), 1
        while name not in by_listed and plain in by_listed.values():
            number += 1
            plain = f"{writable(name)[:60]}_{number}"
        by_listed.setdefault(name, plain)
    return {name: by_listed[name] for name in listed}


def _tool(listed: Any, name: str, run: Callable[..., Any], options: ServerOptions) -> Tool:
    schema = either(listed, "inputSchema", "input_schema")
    try:
        tool = Tool(name, cleaned(listed.description or ""), well_formed_json(schema), run)
        ArgumentCheck(tool)
    except ConfigError as error:
        raise ConfigError(f"mcp: {options.where}: {error}; or leave this tool out by only: [NAMES]") from None
    return tool
