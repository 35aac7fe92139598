"""Call formats: how agents are told of tools, how they write calls, and how results are shown. Imports no torch.

``CALL_FORMATS`` names them. ``native`` is what a model's chat template teaches. ``json`` and ``tags`` are plain text,
for models whose template knows no tools, and for agents behind an API.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from maporl.config.call_options import CallTexts
from maporl.environments.base import Tool
from maporl.errors import ConfigError
from maporl.types import Message
from trl_ext.errors import UserError

OPEN, CLOSE = "<call>", "</call>"


@dataclass(frozen=True)
class Written:
    """A call that an agent wrote. ``error`` says why it cannot be read, and is None for a call that can be."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class CallFormat:
    """The base class of call formats, made for one agent.

    Args:
        tools: the agent's tools.
        texts: the texts of the plain formats.
        parallel: whether a completion may have several calls in a plain format.
    """

    name = ""
    stop_strings: tuple[str, ...] = ()
    """The strings at which a completion ends, because a result must follow."""
    most: int | None = None
    """The most calls in one completion that can be answered. None is any number."""

    def __init__(self, tools: Sequence[Tool], texts: CallTexts, parallel: bool = False):
        self.tools, self.texts, self.parallel = {tool.name: tool for tool in tools}, texts, parallel

    def schemas(self) -> list[dict[str, Any]] | None:
        """Return the schemas that the chat template is given with the first prompt, or None."""
        return None

    def intro(self) -> str | None:
        """Return what the agent's system message says of the tools, or None."""
        return None

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        """Return the calls of a completion, in order."""
        raise NotImplementedError(f"{type(self).__name__}: a call format defines read")

    def heard(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` as the agent's engine reads them: results as messages that it knows."""
        return messages

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return how an agent writes a call, for a warm start.

        Raises:
            ConfigError: what a model writes is known to its chat template only.
        """
        raise ConfigError(
            f"a warm start writes calls in the formats json and tags, not in {self.name}; set call_format"
        )


class NativeFormat(CallFormat):
    """What the chat template teaches: schemas in the first prompt, calls as the model writes them.

    ``reader`` reads the calls of a completion from its token ids (:class:`trl_ext.tool_calls.NativeCalls`).
    """

    name = "native"

    def __init__(self, tools: Sequence[Tool], texts: CallTexts, reader: Any):
        super().__init__(tools, texts)
        self.reader = reader
        self.most = None if reader.several else 1

    def schemas(self) -> list[dict[str, Any]] | None:
        return [tool.schema() for tool in self.tools.values()]

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        try:
            found = self.reader.read(prompt_ids, response_ids, self.schemas())
        except UserError as error:
            return [Written("", error=str(error))]
        return [Written(one.get("name", ""), one.get("arguments", {}), one.get("error")) for one in found]

    def heard(self, messages: list[Message]) -> list[Message]:
        return [{key: m[key] for key in ("role", "name", "content")} if m["role"] == "tool" else m for m in messages]


class PlainFormat(CallFormat):
    """Calls and results as plain text. A subclass says how calls are written."""

    how = ""

    def intro(self) -> str | None:
        lines = [self.texts.line.format(signature=tool.line()) for tool in self.tools.values()]
        parts = ["\n".join([self.texts.intro, *lines]).strip(), self.how.strip()]
        return "\n\n".join(part for part in parts if part)

    def heard(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` with all results in one user message, a line for each.

        A user message that follows belongs to it, because many templates want the roles to alternate.
        """
        results = [m for m in messages if m["role"] == "tool"]
        if not results:
            return messages
        lines = [
            (self.texts.failed if m.get("error") else self.texts.returned).format(
                name=m["name"] or "call", text=m["content"]
            )
            for m in results
        ]
        others = [m for m in messages if m["role"] != "tool"]
        if others and others[0]["role"] == "user":
            lines.append(others.pop(0)["content"])
        return [{"role": "user", "content": "\n".join(lines)}, *others]


class JsonFormat(PlainFormat):
    """``<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call>``."""

    name = "json"

    def __init__(self, tools: Sequence[Tool], texts: CallTexts, parallel: bool = False):
        super().__init__(tools, texts, parallel)
        self.how = texts.json.format()
        self.stop_strings = () if parallel else (CLOSE,)

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        said = _after_thinking(text)
        return [_json_call(body, closed) for _, body, closed in _placed_blocks(said, OPEN, CLOSE)]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


class TagsFormat(PlainFormat):
    """``<search>who wrote Emma</search>``, for tools with exactly one required argument, which is a text.

    Raises:
        ConfigError: a tool has other arguments.
    """

    name = "tags"

    def __init__(self, tools: Sequence[Tool], texts: CallTexts, parallel: bool = False):
        super().__init__(tools, texts, parallel)
        self.how = "\n".join(texts.tags.format(name=name) for name in self.tools)
        self.stop_strings = () if parallel else tuple(f"</{name}>" for name in self.tools)
        self._argument = {}
        for name, tool in self.tools.items():
            needed = tool.parameters.get("required", [])
            kinds = [tool.parameters.get("properties", {}).get(one, {}).get("type") for one in needed]
            if kinds != ["string"]:
                raise ConfigError(
                    f"call_format: tags: tool {name} needs the arguments {list(needed)}, but tags hold exactly one, which is "
                    "text; use call_format: json"
                )
            self._argument[name] = needed[0]

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        said = _after_thinking(text)
        found = []
        for name, argument in self._argument.items():
            for place, body, closed in _placed_blocks(said, f"<{name}>", f"</{name}>"):
                error = None if closed else f"<{name}> has no </{name}>"
                found.append((place, Written(name, {argument: body.strip()}, error)))
        return [call for _, call in sorted(found, key=lambda one: one[0])]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"<{name}>{arguments[self._argument[name]]}</{name}>"


class TypedFormat(PlainFormat):
    """A person types ``/search {"query": "Emma"}``, or ``/search Emma`` if the tool has one argument."""

    name = "typed"

    def __init__(self, tools: Sequence[Tool], texts: CallTexts):
        super().__init__(tools, texts)
        self.how = 'To use one, type /NAME {"argument": value}, or /NAME and the value if it has one argument.'

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        typed = re.fullmatch(r"\s*/([A-Za-z_][\w-]*)\s*(.*?)\s*", text, re.DOTALL)
        if typed is None:
            return []
        name, rest = typed.groups()
        if rest.startswith("{"):
            return [_json_call(f'{{"name": {json.dumps(name)}, "arguments": {rest}}}', True)]
        known = self.tools[name].parameters.get("properties", {}) if name in self.tools else {}
        if rest and len(known) != 1:
            return [Written(name, error=f"write its arguments as JSON: {', '.join(known) or 'it has none'}")]
        return [Written(name, {next(iter(known)): rest} if rest else {})]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"/{name} {json.dumps(arguments)}"


def _placed_blocks(text: str, opening: str, closing: str) -> list[tuple[int, str, bool]]:
    """Return where each block begins, what stands in it, and whether it is closed."""
    found, place = [], text.find(opening)
    while place >= 0:
        following = text.find(opening, place + len(opening))
        end = text.find(closing, place)
        closed = end >= 0 and (following < 0 or end < following)
        stop = end if closed else following if following >= 0 else len(text)
        found.append((place, text[place + len(opening) : stop], closed))
        place = following
    return found


def _after_thinking(text: str) -> str:
    """Return ``text`` without its thinking, or "" if the thinking does not end."""
    thought, ended, rest = text.rpartition("</think>")
    if ended:
        return rest
    return "" if "<think>" in thought + rest else text


def _json_call(body: str, closed: bool) -> Written:
    if not closed:
        return Written("", error=f"{OPEN} has no {CLOSE}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Written("", error=f"it is not JSON: {str(error)[:120]}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Written("", error='it is not an object with "name" and "arguments"')
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return Written(found["name"], error=f"its arguments are not an object: {json.dumps(arguments)[:80]}")
    return Written(found["name"], arguments)


CALL_FORMATS: dict[str, Callable[..., CallFormat]] = {
    "native": NativeFormat,
    "json": JsonFormat,
    "tags": TagsFormat,
    "typed": TypedFormat,
}


def build_format(
    name: str, tools: Sequence[Tool], texts: CallTexts, native: Callable[[], Any], where: str, parallel: bool = False
) -> CallFormat:
    """Return the call format ``name`` for an agent's ``tools``. ``auto`` is ``native`` where the template allows it.

    Args:
        name: a name of ``CALL_FORMATS``, or "auto".
        tools: the agent's tools.
        texts: the texts of the plain formats.
        native: returns the reader of the chat template's own calls, or None if the template has none.
        where: the agent, with which errors begin.
        parallel: whether a completion may have several calls in a plain format.

    Raises:
        ConfigError: the format does not suit the tools or the template.
    """
    if name in ("auto", "native"):
        reader = native()
        if reader is not None:
            return NativeFormat(tools, texts, reader)
        if name == "native":
            raise ConfigError(
                f"{where}.call_format: native: its chat template does not show tools, calls and results, or its calls cannot be "
                "read; use auto, json or tags, or another chat template"
            )
        name = "json"
    try:
        return CALL_FORMATS[name](tools, texts, parallel)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
