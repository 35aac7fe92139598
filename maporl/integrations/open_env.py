"""Environments behind a server of OpenEnv, each dialogue in a session of its own. Imports no torch.

It needs the package ``openenv`` (extra ``openenv``), which cannot be installed beside version 2 of ``mcp``. The server
must run in its simulation mode, and have as many sessions (``max_concurrent_envs``) as dialogues are played at once.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maporl.config.imports import unknown
from maporl.environments.base import Environment, Tool
from maporl.errors import ConfigError, install_command
from maporl.event_loop import CONNECTIONS, inside, wait
from maporl.hosts import check_address, proxy_of
from maporl.types import Result

_GONE = Result("the connection to it is lost", error="lost", done=True)
_FULL = "CAPACITY_REACHED"
_SECONDS = 3600.0
"""The package waits so long for an answer. The limits of calls are shorter, and end a call before."""
_PAUSE = 0.2
_OFFERED: dict[tuple[str, str | None], tuple[bool, list[tuple[str, str, dict[str, Any]]]]] = {}
"""Whether each server has tools of its own, and the name, description and schema of what agents are offered. A process
asks a server once."""


class OpenEnv(Environment):
    """A session with a server of OpenEnv.

    The tools of a tool server are offered as they are. Another server gets one tool, ``act``, with the schema of its
    actions; or with ``spoken`` a tool ``act(action)`` whose text becomes that field of the action, for the protocol
    ``world``. The reward of a step is paid to the utterance that acted.

    Args:
        url: the address of the server.
        network: whether it may be on another machine.
        spoken: the field of the action that the text of an agent becomes.
        show: the field of the observation that agents are shown. None: the only field, or all of them as JSON.
        reset: arguments of the server's ``reset`` besides the seed.
        columns: the columns of the question that ``reset`` gets too.
        open_seconds: the most seconds that a free session is waited for.

    Raises:
        ConfigError: ``url`` is not an address, or is on another machine without ``network``; or the package is missing.
    """

    def __init__(
        self,
        url: str,
        network: bool = False,
        spoken: str | None = None,
        show: str | None = None,
        reset: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
        open_seconds: float = 50.0,
    ):
        check_address("openenv", url, network)
        self._make = _package()
        self._url, self._spoken, self._show = url, spoken, show
        self._arguments, self._columns, self._open_seconds = dict(reset or {}), tuple(columns), open_seconds
        self._client: Any = None
        self._done = self._gone = False

    def reset(self, seed: int, row: Mapping[str, Any]) -> str | None:
        """Take a session of the server, and begin with the seed.

        Raises:
            ConfigError: the server cannot be reached, has no free session, does not begin, or the question has no such
                column.
        """
        missing = [name for name in self._columns if name not in row]
        if missing:
            raise ConfigError(f"openenv: columns: {unknown(missing[0], row)}")
        arguments = {**self._arguments, **{name: row[name] for name in self._columns}, "seed": seed}
        answer = wait(self._begun(arguments), loop=CONNECTIONS)
        self._done = bool(answer.done)
        return self._text(answer.observation) if _fields(answer.observation) else None

    def tools(self, agent: str) -> list[Tool]:
        """Return the tools, which every agent has.

        Raises:
            ConfigError: the server cannot be asked for them, or its actions have no field ``spoken``.
        """
        key = (self._url, self._spoken)
        if key not in _OFFERED:
            _OFFERED[key] = self._offered()
        has_tools, offered = _OFFERED[key]
        return [Tool(*entry, run=self._calls(entry[0]) if has_tools else self._act, ordered=True) for entry in offered]

    def can_pay(self, agents: Sequence[str]) -> bool:
        """Return True: a step may have a reward."""
        return True

    def over(self) -> bool:
        """Return whether the server said that the episode is over. It would carry out further steps."""
        return self._done

    def close(self) -> None:
        """Give the session back."""
        client, self._client = self._client, None
        if client is not None:
            wait(_closed(client), loop=CONNECTIONS)

    # -- with the server ----------------------------------------------------------------------------------------------

    async def _begun(self, arguments: Mapping[str, Any]) -> Any:
        """Return the first observation. A server that is full or away is asked again for ``open_seconds``."""
        until = time.monotonic() + self._open_seconds
        while True:
            client = self._make(base_url=self._url, message_timeout_s=_SECONDS, mode="simulation")
            try:
                await client.connect()
                answer = await client.reset(**arguments)
                self._client = client
                return answer
            except Exception as error:
                await _closed(client)
                passing = isinstance(error, OSError) or _FULL in str(error)
                if not passing or time.monotonic() + _PAUSE > until:
                    from maporl.http_client import through  # slow to import

                    where = f"{self._url}{through(proxy_of(self._url))}"
                    raise ConfigError(f"openenv: {where}: no session{_advice(error)}") from None
            await asyncio.sleep(_PAUSE)

    def _offered(self) -> tuple[bool, list[tuple[str, str, dict[str, Any]]]]:
        from maporl.http_client import HttpClient, unchanged  # slow to import, and only this needs it

        try:
            action = HttpClient(self._url, 30.0).get("/schema", unchanged)["action"]
            properties = {name: p for name, p in action["properties"].items() if name != "metadata"}
        except (RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"openenv: {self._url}: it does not tell the schema of its actions: {error}") from None
        if self._spoken is not None:
            if self._spoken not in properties:
                raise ConfigError(f"openenv: spoken: {self._url}: {unknown(self._spoken, properties)}")
            said = {"action": {"type": "string", "description": "what you do"}}
            schema = {"type": "object", "properties": said, "required": ["action"]}
            return False, [("act", "Act in the environment.", schema)]
        if {"tool_name", "arguments"} <= properties.keys():
            return True, wait(self._listed(), loop=CONNECTIONS)
        schema = {key: action[key] for key in ("type", "required", "$defs") if key in action}
        return False, [("act", action.get("description", ""), {**schema, "properties": properties})]

    async def _listed(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Ask a tool server for its tools, in a session that is given back."""
        await self._begun({})
        client, self._client = self._client, None
        try:
            listed = (await client.step({"type": "list_tools"})).observation["tools"]
        finally:
            await _closed(client)
        return [(tool["name"], tool.get("description") or "", tool["input_schema"]) for tool in listed]

    async def _act(self, **arguments: Any) -> Result:
        return await self._stepped(arguments if self._spoken is None else {self._spoken: arguments["action"]})

    def _calls(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> Result:
            return await self._stepped({"type": "call_tool", "tool_name": name, "arguments": arguments})

        return call

    async def _stepped(self, action: dict[str, Any]) -> Result:
        """Take a step. After a broken connection the package would go on in a new episode, so nothing is sent then."""
        if self._gone or self._client is None:
            return _GONE
        try:
            answer = await inside(_answer(self._client, action), CONNECTIONS)
        except RuntimeError as error:  # what the server says itself, such as that an action is invalid
            return Result(_plain(error), error="raised")
        except BaseException as error:
            self._gone = self._done = True
            if isinstance(error, Exception):
                return _GONE
            raise
        self._done = bool(answer.done)
        seen = answer.observation
        failed, text = _tool_answer(seen) if "tool_name" in seen else (False, self._text(seen))
        reward = None if answer.reward is None else float(answer.reward)
        value = {"observation": seen}
        return Result(text, value, "raised" if failed else None, reward, self._done)

    def _text(self, observation: Any) -> str:
        fields = _fields(observation)
        if self._show is not None:
            if self._show not in fields:
                raise ConfigError(f"openenv: show: {self._url}: {unknown(self._show, fields)}")
            return str(fields[self._show])
        only = next(iter(fields.values())) if len(fields) == 1 else fields
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)


def _fields(observation: Any) -> dict[str, Any]:
    return {name: value for name, value in observation.items() if name != "metadata"}


def _tool_answer(seen: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether a tool failed, and what it answered."""
    if seen.get("error"):
        return True, str(seen["error"].get("message", seen["error"]))
    result = seen.get("result")
    if not isinstance(result, Mapping) or "content" not in result:
        return False, "done" if result is None else str(result)
    other = [part["type"] for part in result["content"] if part["type"] != "text"]
    if other:
        return True, f"it returned content of the type {other[0]!r}; only text can be shown"
    return bool(result.get("is_error")), "\n".join(part["text"] for part in result["content"]) or "done"


async def _answer(client: Any, action: dict[str, Any]) -> Any:
    return await client.step(action)


async def _closed(client: Any) -> None:
    await client.close()


def _plain(error: BaseException) -> str:
    return " ".join(str(error).removeprefix("Server error: ").split())[:300]


def _advice(error: BaseException) -> str:
    if _FULL in str(error):
        return (
            f" is free ({_plain(error)}); start it with max_concurrent_envs of at least the dialogues that are played "
            "at once"
        )
    return f": {type(error).__name__}: {_plain(error)}"


def _package() -> Any:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise ConfigError(
            f"openenv: it needs the package openenv ({error}); install it with: {install_command('openenv')}"
        ) from None
    return GenericEnvClient
