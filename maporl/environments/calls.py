"""Call formats: how agents are told of tools, how they write calls, and how results are shown. Imports no torch.

``CALL_FORMATS`` names them. ``native`` is what a model's chat template teaches. ``json`` and ``tags`` are plain text,
for models whose template knows no tools, and for agents behind an API.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maporl.config.call_options import CallTexts
from maporl.decoding import StructuredOutput
from maporl.environments.base import Tool
from maporl.errors import ConfigError
from maporl.types import Message
from trl_ext.chat.tool_calls import CallParts
from trl_ext.chat.written_calls import IN_THINKING, IN_THOUGHT, MARKS, MOST, call_of, is_named, read_written_calls
from trl_ext.chat.written_values import Unreadable, past_space, read_value, whole_value
from trl_ext.errors import UserError, retold

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

    def single(self) -> "CallFormat | None":
        """Return the same format for completions that end right after their first call, or None if nothing ends them
        there."""
        return None

    def parts(self) -> CallParts | None:
        """Return how a call is written, or None if its arguments are not JSON."""
        return None

    def grammar(self, choice: str, strict: Collection[str], content: str | None) -> str | None:
        """Return the grammar of a completion in Lark's form, or None if it may be anything.

        Args:
            choice: ``auto``, ``required`` for one call of any tool, or the name of a tool for one call of it. A call
                that must be made keeps to the schema of its tool.
            strict: the tools whose other calls keep to their schemas, too. Those of others have any object.
            content: what a completion without a call keeps to, as an expression of Lark. None: nothing.

        Raises:
            ConfigError: calls are not written in a way that a grammar can say.
        """
        if choice == "auto" and not (content or strict):
            return None
        if (parts := self.parts()) is None:
            what = f"calls in the format {self.name} of this agent cannot be held to a schema"
            raise ConfigError(f"{what}; set agents.NAME.call_format: json, leave it out, or add it to protocol.ignore")
        bodies, rules = [], []
        for number, (name, tool) in enumerate(self.tools.items()):
            if choice in ("auto", "required", name):
                schema = tool.parameters if choice != "auto" or name in strict else {"type": "object"}
                if parts.key:
                    arguments, *more = _named_arguments(schema, f"of_{number}", parts)
                    rules += more
                else:
                    arguments = StructuredOutput(json_schema=schema).expression
                bodies.append([json.dumps(name), *parts.between, arguments, *parts.after])
        rules.insert(0, "body: " + " | ".join(" ".join(body) for body in bodies))
        if choice != "auto" or content is not None:
            start = "call" if content is None or choice != "auto" else f"call | {content}"
            return "\n".join([f"start: {start}", f"call: {' '.join(parts.before)} body", *rules])
        # words, until a call begins
        marks = [number for number, part in enumerate(parts.before) if part.startswith("<[")]
        if marks:
            begin = ["text", *parts.before[marks[0] :]]
        else:
            before = "".join(map(json.loads, parts.before)).lstrip()
            mark = min((mark for mark in MARKS if mark in before), key=before.index, default=before)
            begin = ["begun", json.dumps(before.partition(mark)[2])]
            rules.append(f"begun[lazy]: TEXT {json.dumps(mark)}")
        words = ["text: TEXT", "TEXT: /(?s:.*)/"]
        return "\n".join(["start: called* text", f"called: {' '.join(begin)} body", *rules, *words])

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
        raise ConfigError(f"a warm start writes calls in the formats json and tags, not {self.name}; set call_format")


_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_NOTES = {"title", "description", "examples", "default"}


def _named_arguments(schema: Mapping[str, Any], rule: str, parts: CallParts) -> list[str]:
    """Return the arguments of a call, each with marks of its own, in Lark's form: an expression, and its rules.

    Args:
        schema: what the arguments are held to. Those that it does not require may be left out. Without ``properties``
            there may be any.
        rule: what the names of the rules begin with.
        parts: how a call is written.

    Raises:
        ConfigError: the schema says more than which properties there are.
    """
    if unknown := sorted(schema.keys() - _OF_OBJECTS - _NOTES):
        raise ConfigError(
            f"a tool's parameters: {', '.join(unknown)} cannot be held to where arguments are not JSON; write them in "
            "the properties, or set agents.NAME.call_format: json"
        )
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    given = schema.get("properties")
    wanted, rules = [], []
    for number, (name, kind) in enumerate(({"": {"type": "string"}} if given is None else given).items()):
        said, kind = f"{rule}_{number}", kind if isinstance(kind, Mapping) else {}
        optional = "*" if given is None else "" if name in schema.get("required", ()) else "?"
        wanted.append(said + optional)
        title = "/[A-Za-z_][A-Za-z0-9_]*/" if given is None else json.dumps(name)
        if (text := _text_of(kind, shared)) is None:
            what = [StructuredOutput(json_schema={**kind, **shared}).expression, *parts.end]
        elif parts.end[0].startswith("<["):  # a special token, which no text has in it
            what = [text, *parts.end]
        else:  # a text with the mark in it, or a new line around it, would be read as another one
            mark = re.escape(json.loads(parts.end[0]).strip())
            other = StructuredOutput(regex=rf"\n(?s:.*)|(?s:.*)\n|(?s:.*){mark}(?s:.*)").expression
            rules.append(f"{said}_text[lazy]: ({text} & ~{other}) {parts.end[0]}")
            what = [f"{said}_text", *parts.end[1:]]
        rules.append(" ".join([f"{said}:", *parts.key, title, *parts.value, *what]))
    return [" ".join(wanted), *rules]


def _text_of(schema: Any, shared: Mapping[str, Any], refs: int = 8) -> str | None:
    """Return the texts that a schema allows, in Lark's form, or None if it allows no text, or names a schema that is
    missing.

    ``refs`` is how many references are followed, because they may lead round in a circle.
    """
    if not isinstance(schema, Mapping) or refs < 0:
        return None
    where, *name = str(schema.get("$ref", "")).removeprefix("#/").split("/")
    if len(name) == 1:
        return _text_of(shared.get(where, {}).get(name[0]), shared, refs - 1)
    for way in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if (text := _text_of(way, shared, refs - 1)) is not None:
            return text
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [json.dumps(one) for one in values if isinstance(one, str)]
        return f"({' | '.join(texts)})" if texts else None
    kinds = schema.get("type")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return None
    text = f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
    if (pattern := schema.get("pattern")) is None:
        return text
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    around = ["" if anchored else "(?s:.*)" for anchored in (begins, ends)]
    regex = f"({pattern[begins : len(pattern) - ends]})".join(around)
    return f"({StructuredOutput(regex=regex).expression} & {text})"


class NativeFormat(CallFormat):
    """What the chat template teaches: schemas in the first prompt, calls as the model writes them.

    ``reader`` reads the calls of a completion from its token ids (:class:`trl_ext.chat.tool_calls.NativeCalls`).
    """

    name = "native"

    def __init__(self, tools: Sequence[Tool], texts: CallTexts, reader: Any):
        super().__init__(tools, texts)
        self.reader = reader
        self.most = None if reader.several else 1

    def single(self) -> "CallFormat | None":
        one = NativeFormat(list(self.tools.values()), self.texts, self.reader)
        one.stop_strings = self.reader.ends
        return one if self.reader.ends or not self.reader.several else None

    def schemas(self) -> list[dict[str, Any]] | None:
        return [tool.schema() for tool in self.tools.values()]

    def parts(self) -> CallParts | None:
        return self.reader.parts

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        try:
            calls = self.reader.read(prompt_ids, response_ids, self.schemas())
        except UserError as error:
            return [Written("", error=str(error))]
        return [Written(one.get("name", ""), one.get("arguments", {}), one.get("error")) for one in calls]

    def heard(self, messages: list[Message]) -> list[Message]:
        return [_native(message) for message in messages]


def _native(message: Message) -> Message:
    """Return a message as chat templates know it."""
    if message["role"] == "tool":
        return {key: message[key] for key in ("role", "name", "content")}
    if "tool_calls" in message:
        calls = [{"type": "function", "function": call} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return message


class PlainFormat(CallFormat):
    """Calls and results as plain text. A subclass says how calls are written."""

    how = ""

    def single(self) -> CallFormat:
        return type(self)(list(self.tools.values()), self.texts) if self.parallel else self

    def read(self, text: str, prompt_ids: list[int], response_ids: list[int]) -> list[Written]:
        """Return the calls of a completion.

        One in the format of another family of models is told how it is written here.
        """
        calls = self.calls(text)
        if calls:
            return calls
        schemas = [tool.schema() for tool in self.tools.values()]
        # without the prompt it is not known whether that had opened the thinking that ends
        other = [one for one in read_written_calls(text, "", schemas) if one.get("error") != IN_THOUGHT]
        reasons = [one["error"] for one in other if one.get("error", "").startswith(IN_THINKING)]
        reasons += [f"calls are not written so here; write {self.example()}"]
        return [Written("", error=reasons[0])] if other else []

    def calls(self, text: str) -> list[Written]:
        """Return the calls of a completion that are written as this format wants them."""
        raise NotImplementedError(f"{type(self).__name__}: a plain format defines calls")

    def example(self) -> str:
        """Return how a call is written, in short."""
        raise NotImplementedError(f"{type(self).__name__}: a plain format defines example")

    def intro(self) -> str | None:
        lines = [self.texts.line.format(signature=tool.told()) for tool in self.tools.values()]
        parts = ["\n".join([self.texts.intro, *lines]).strip(), self.how.strip()]
        return "\n\n".join(part for part in parts if part)

    def heard(self, messages: list[Message]) -> list[Message]:
        """Return ``messages`` with all results in one user message, a line for each.

        A user message that follows belongs to it, because many templates want the roles to alternate.
        """
        shown: list[Message] = []
        lines: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                form = self.texts.failed if message.get("error") else self.texts.returned
                lines.append(form.format(name=message["name"] or "call", text=message["content"]))
                continue
            if lines and message["role"] == "user" and "name" not in message:
                message = {**message, "content": "\n".join([*lines, message["content"]])}
            elif lines:
                shown.append({"role": "user", "content": "\n".join(lines)})
            lines = []
            shown.append(self._with_calls(message) if "tool_calls" in message else message)
        return [*shown, {"role": "user", "content": "\n".join(lines)}] if lines else shown

    def _with_calls(self, message: Message) -> Message:
        """Return an assistant message with the text of its calls, which somebody else has taken out of it."""
        calls = [self.write(call["name"], call["arguments"]) for call in message["tool_calls"]]
        said = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**said, "content": "\n".join(part for part in (message["content"], *calls) if part)}


class JsonFormat(PlainFormat):
    """``<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call>``."""

    name = "json"

    def __init__(self, tools: Sequence[Tool], texts: CallTexts, parallel: bool = False):
        super().__init__(tools, texts, parallel)
        self.how = texts.json.format()
        self.stop_strings = () if parallel else (CLOSE,)

    def calls(self, text: str) -> list[Written]:
        blocks = _blocks(text, {OPEN: CLOSE}, _end_of_json)
        return [_json_call(block.body) if block.error is None else Written("", error=block.error) for block in blocks]

    def example(self) -> str:
        return f'{OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE}'

    def parts(self) -> CallParts | None:
        texts = f'{OPEN}{{"name": "', '", "arguments": ', f"}}{CLOSE}"
        return CallParts(*([json.dumps(text)] for text in texts))

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
                    f"call_format: tags: tool {name} needs the arguments {list(needed)}, but tags hold exactly one, "
                    "which is text; use call_format: json"
                )
            self._argument[name] = needed[0]

    def calls(self, text: str) -> list[Written]:
        blocks = _blocks(text, {f"<{name}>": f"</{name}>" for name in self._argument})
        names = [block.opening[1:-1] for block in blocks]
        return [
            Written(name, {self._argument[name]: block.body.strip()}, block.error)
            for name, block in zip(names, blocks, strict=True)
        ]

    def example(self) -> str:
        return " or ".join(f"<{name}>{argument}</{name}>" for name, argument in self._argument.items())

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
            return [_json_call(f'{{"name": {json.dumps(name)}, "arguments": {rest}}}')]
        properties = self.tools[name].parameters.get("properties", {}) if name in self.tools else {}
        if rest and len(properties) != 1:
            return [Written(name, error=f"write its arguments as JSON: {', '.join(properties) or 'it has none'}")]
        return [Written(name, {next(iter(properties)): rest} if rest else {})]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"/{name} {json.dumps(arguments)}"


def before_calls(text: str) -> str:
    """Return what a completion says before its calls, in whatever format these are.

    >>> before_calls('Let me look.<call>{"name": "search"}</call>'), before_calls('{"name": "search", "arguments": {}}')
    ('Let me look.', '')
    """
    places = [place for mark in (OPEN, *MARKS) if (place := text.find(mark)) >= 0]
    if not places:
        return "" if text.lstrip().startswith(("{", "[", "<")) else text
    return text[: min(places)].strip()


@dataclass(frozen=True)
class _Block:
    """What stands between two marks. ``error`` says why it cannot be read, if it cannot."""

    opening: str
    body: str
    error: str | None


def _blocks(text: str, marks: dict[str, str], end_of: Callable[[str, int], int | None] | None = None) -> list[_Block]:
    """Return the blocks outside of the model's thinking. ``marks``: what ends a block, by what begins it."""
    # ``end_of`` returns where what begins at a place ends by itself, or None if nothing that may be a call begins
    # there; a mark before this place is part of the block. Without it only the mark says where a block ends
    blocks: list[_Block] = []
    thought = False
    scan = re.compile("|".join(re.escape(mark) for mark in ("<think>", "</think>", *marks)))
    place = 0
    while (match := scan.search(text, place)) is not None:
        opening, start = match[0], match.end()
        if opening == "<think>":
            end = text.find("</think>", start)
            place = len(text) if end < 0 else end + len("</think>")
            thought = "<think>" not in text[start:end]  # what opens it once more within it may end it once more
        elif opening == "</think>":
            if not thought:  # the prompt had opened it, so that all before it was thinking
                blocks.clear()
            place, thought = start, True
        elif len(blocks) == MOST:
            blocks.append(_Block(opening, "", f"there are more than {MOST} calls; what follows is not read"))
            break
        else:
            block, place = _block(text, start, opening, marks[opening], end_of)
            blocks += [block] if block else []
    return blocks


def _block(
    text: str, start: int, opening: str, closing: str, end_of: Callable[[str, int], int | None] | None
) -> tuple[_Block | None, int]:
    """Return the block that begins at ``start``, or None if words only name its mark, and where to read on."""
    own_end = end_of(text, start) if end_of else None
    following = text.find(opening, own_end or start)
    limit = len(text) if following < 0 else following
    end = text.find(closing, own_end or start, limit)
    if (end_of or end < 0) and is_named(text, start - len(opening), start):
        return None, start
    if own_end is not None and past_space(text, own_end) == following and not text[following + len(opening) :].strip():
        return _Block(opening, text[start:own_end], None), len(text)  # its opening mark stands where it ends
    if end < 0:
        return _Block(opening, text[start:limit], f"{opening} has no {closing}"), start if own_end is None else own_end
    after = end + len(closing)
    if own_end is None and text.find(closing, after, limit) >= 0:
        error = f"{closing} stands in it, so that it is not clear where it ends"
        return _Block(opening, text[start:end], error), limit
    return _Block(opening, text[start:end], None), after


def _end_of_json(text: str, place: int) -> int | None:
    try:
        return read_value(text, place)[1] if text.startswith("{", past_space(text, place)) else None
    except Unreadable:
        return None


def _json_call(body: str) -> Written:
    try:
        value = whole_value(body)
    except Unreadable as error:
        return Written("", error=f"it is not JSON: {error}")
    try:
        return Written(*call_of(value))
    except Unreadable as error:
        return Written("", error=str(error))


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
                f"{where}.call_format: native: its chat template does not show tools, calls and results, or its calls "
                "cannot be read; use auto, json or tags, or another chat template"
            )
        name = "json"
    with retold(ConfigError, lambda error: ConfigError(f"{where}.{error}")):
        return CALL_FORMATS[name](tools, texts, parallel)
