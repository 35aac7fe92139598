"""Calls of tools as models write them, found in the text of a completion.

Every family of models has marks of its own around a call, and writes a name and arguments in one of a few ways. Models
do not always write as their template shows: a mark is missing, JSON stands where the template has XML, or the arguments
have another name. So one reader knows the marks of all families and the ways of writing calls, and reads each of these
in any of those. Documented forms, all of them literal tests:

- ``<tool_call>`` with JSON (Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4), with ``<function=`` (Qwen3-Coder, Qwen 3.5,
  Nemotron 3), or with ``<arg_key>`` (GLM 4.5);
- a bare JSON object, ``<|python_tag|>``, ``<function=add>{...}</function>`` and ``[add(a=1)]`` (Llama 3 and 4);
- ``[TOOL_CALLS]`` (Mistral), messages with a recipient (gpt-oss), ``<\uff5ctool\u2581call\u2581begin\uff5c>`` and DSML
  (DeepSeek), ``call:add{...}`` (Gemma 4, FunctionGemma), ``<|tool_call|>`` (Phi-4, Granite 3), ``<|tool_call_start|>``
  (LFM2), and the marks of Kimi, MiniMax, Seed, Cohere, Hunyuan, InternLM, Nemotron Nano, LongCat and OLMo 3;
- of tools that exist, ``Action: add`` and ``Action Input: {...}`` (ReAct), and a line with the name before one with the
  arguments (GLM 4, and after ``>>>`` Functionary 3.2).

What has a mark of a call and cannot be read is told as such. Words may name a mark without a call, and there may be a
mark too many, such as an opening mark in place of the one that ends the last call. An argument ends where its own value
ends: a mark inside a program is part of it. Where that cannot be known, because an end mark stands twice, the call is
not read. Nothing that stands in the model's thinking is a call, and nothing that repeats what it was told: the schemas
of tools and their results. The time is linear in the length of the text.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from trl_ext.chat.thoughts import THINKING, THOUGHT_ENDS, end_of_begun_thought
from trl_ext.chat.written_values import Unreadable, past_space, read_value, whole_value

MOST = 128
"""Most calls of a completion.

What follows is not read, so that each character is looked at a bounded number of times.
"""
BEGIN, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
TOLD = {
    "<tools>": "</tools>",
    "<functions>": "</functions>",
    "<AVAILABLE_TOOLS>": "</AVAILABLE_TOOLS>",
    "[AVAILABLE_TOOLS]": "[/AVAILABLE_TOOLS]",
    "<|tool_list_start|>": "<|tool_list_end|>",
    "<start_function_declaration>": "<end_function_declaration>",
    "<tool_response>": "</tool_response>",
    "<TOOL_RESPONSE>": "</TOOL_RESPONSE>",
    "<function_response>": "</function_response>",
    "<function_results>": "</function_results>",
    "[TOOL_RESULTS]": "[/TOOL_RESULTS]",
    "<|tool_response>": "<tool_response|>",
    "<|tool_response_start|>": "<|tool_response_end|>",
    "<start_function_response>": "<end_function_response>",
    "<|START_TOOL_RESULT|>": "<|END_TOOL_RESULT|>",
    "<\uff5ctool\u2581output\u2581begin\uff5c>": "<\uff5ctool\u2581output\u2581end\uff5c>",
}
"""The marks around what a model is told: its tools and their results.

A model that writes them itself calls nothing there.
"""
MARKS = {
    "<tool_call>": "</tool_call>",
    "<longcat_tool_call>": "</longcat_tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<function_call>": "</function_call>",
    "<function_calls>": "</function_calls>",
    "<seed:tool_call>": "</seed:tool_call>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|tool_call>": "<tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|tool_call_begin|>": "<|tool_call_end|>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<start_function_call>": "<end_function_call>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": "<\uff5ctool\u2581calls\u2581end\uff5c>",
    BEGIN: END,
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|action_start|><|plugin|>": "<|action_end|>",
    "<|tools_prefix|>": "<|tools_suffix|>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "<|python_start|>": "<|python_end|>",
    "functools": "",
    "```tool_code": "```",
    "```tool_call": "```",
}
"""The marks around a call. Some models write none at its end."""
IN_THINKING = "it stands in thinking that has no "
"""Begins the reason why a call is not read that stands in thinking without end."""
IN_THOUGHT = "it stands before the end of a thought that nothing began"
"""The reason why a call is not read after which a thought ends that neither the prompt nor the model began."""
_SPACE = r"(?:[\w\uff5c]{1,16}[:\uff5c])?"
_NAME = r"[A-Za-z_][\w.\-/]{0,127}"
_FUNCTION = re.compile(
    rf"<(?P<space>[\w\uff5c]{{1,16}}[:\uff5c])?(?:(?:function|tool)\s*=|(?:function|invoke) name=)\s*[\"']?(?P<name>{_NAME})[\"']?\s*>"  # noqa: E501
)
"""How a call with named parameters begins: ``<function=add>``, ``<invoke name="add">``, with a name space or without.
"""
_PARAMETER = re.compile(
    r"<" + _SPACE + r"parameter(?:\s*=\s*| name=)[\"']?(?P<key>[^>\n\"']{1,128}?)[\"']?(?: [^>\n]{0,64})?\s*>"
    r"|<(?:longcat_)?arg_key>\s*(?P<other>[^<>\n]{1,128}?)\s*</(?:longcat_)?arg_key>\s*<(?:longcat_)?arg_value>"
)
_END_OF_TEXT = r"(?:<\|[A-Za-z_]{1,32}\|>|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>|<end_of_turn>|<turn\|>|<eos>|\Z)"
_AFTER_ALL = rf"</(?:longcat_)?tool_call>|</(?:seed|minimax):tool_call>|{_END_OF_TEXT}"
_PARAMETER_END = re.compile(
    rf"</{_SPACE}parameter>(?=\s*(?:<{_SPACE}parameter[ =]|</{_SPACE}(?:function|tool|invoke)>|{_AFTER_ALL}))"
)
_VALUE_END = re.compile(rf"</(?:longcat_)?arg_value>(?=\s*(?:<(?:longcat_)?arg_key>|{_AFTER_ALL}))")
_NEXT_TAG = re.compile(
    r"\n?[ \t]{0,32}(?=<" + _SPACE + r"parameter[ =]|</" + _SPACE + r"(?:function|invoke)>|</(?:longcat_)?tool_call>)"
)
_FUNCTION_END = re.compile(rf"</{_SPACE}(?:function|tool|invoke)>")
_TEXT_END = re.compile(rf"\s*{_END_OF_TEXT}")
_SAID = re.compile(r"[`'\"*)\].,;:!?]|[ \t]+[^\s{\[<]")
"""What follows a mark in its line where words name it."""
_STRAY = re.compile(rf"</{_SPACE}(?:parameter|function|invoke)>|</(?:longcat_)?arg_value>")
_NEXT_CALL = re.compile(
    rf"{_FUNCTION.pattern}\s{{0,32}}(?:<{_SPACE}parameter[ =]|</{_SPACE}(?:function|tool|invoke)>|\{{)"
    rf"|<(?:longcat_)?tool_call>\s{{0,32}}{_NAME}\s{{0,32}}(?:<tool_sep>\s{{0,32}})?<(?:longcat_)?arg_key>"
)
"""How a further call with named parameters begins. Up to there an end mark may be that of an argument."""
_CLOSERS = sorted({close for close in MARKS.values() if close and close != "```"}, key=len, reverse=True)
_BARE = r'(?P<bare>(?:\[\s{0,32})?\{\s{0,32}"(?:name|type|function|tool|tool_name|tool_call_id|id|call_id|arguments|parameters|tool_calls|role)"\s{0,32}:)'  # noqa: E501


def _any_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_OPENING = (
    rf"(?P<mark>{_any_of(word for word in MARKS if word != 'functools')}|functools(?=\[\s{{0,32}}\{{))"
    rf"|(?P<function><{_SPACE}(?:function\s*=|tool\s*=|(?:function|invoke) name=))"
)
_BOLD = r"\*{0,2}"
_LINE = (
    rf"(?P<line>(?m:^)\s{{0,8}}{_BOLD}Action{_BOLD}:{_BOLD}\s{{0,8}}`?(?P<react>{_NAME})`?\s{{1,8}}"
    rf"{_BOLD}Action Input{_BOLD}:{_BOLD}(?:\s{{0,8}}```(?:json)?)?"
    rf"|(?:(?m:^)|>>>|<\|assistant\|>)(?P<called>{_NAME})[ \t]{{0,8}}\n(?=\{{))"
)
"""How a call begins that names its tool in a line of its own."""
_WORDS = re.compile(
    r"[ \t]*([^\s{\[`][^\n]*?)"
    rf"(?:\n\s{{0,8}}(?={_BOLD}(?:Observation|Thought|Action|Final Answer)|{_END_OF_TEXT})|{_END_OF_TEXT})"
)
"""A line of words after ``Action Input:``, with nothing after it that may belong to it."""
_SCAN = re.compile(
    rf"{_LINE}|(?P<think>{_any_of(THINKING)})|(?P<told>{_any_of(TOLD)})|(?P<thought>{_any_of(THOUGHT_ENDS)})|{_OPENING}"
    rf"|(?P<inside>\[ARGS\]|{re.escape(SEPARATOR)}|<\|tool_call_argument_begin\|>|<tool_sep>|<(?:longcat_)?arg_key>|\bcall:(?={_NAME}\{{))"
    rf"|(?P<close>{_any_of(_CLOSERS)})|{_BARE}"
)
_OPENS = re.compile(_OPENING)
_LIMIT = re.compile(rf"{_OPENING}|{_any_of(THINKING)}|{_any_of(THOUGHT_ENDS)}")
_HARMONY = re.compile(r"\s*(?:to=|<\|start\|>|<\|channel\|>)")
"""How a completion of gpt-oss begins: with a channel, or with who speaks or is called."""
_HARMONY_CALL = re.compile(r"<\|channel\|>[^<{\n]{0,80}\bto=")
_CALLED = re.compile(
    rf"(?:function{re.escape(SEPARATOR)})?(?:functions\.)?(?P<name>{_NAME})\s*(?::\d+)?\s*(?:\[CALL_ID\][\w-]*)?\s*"
    rf"(?:\[ARGS\]|{re.escape(SEPARATOR)}|<\|tool_call_argument_begin\|>|<tool_sep>)?\s*(?:```(?:json)?\s*)?(?=\{{)"
)
"""A name before arguments in JSON."""
_NAMED = re.compile(rf"(?:call:)?(?P<name>{_NAME})\s*(?:<tool_sep>\s*)?")
_KEY = re.compile(r"<(?:longcat_)?arg_key>")
_FENCE = re.compile(r"```(?:json|python|tool_code|tool_call)?\s*")
_PYTHON = re.compile(rf"(?P<name>{_NAME})\s*\(")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_BEFORE = re.compile(rf"(?:function|{_NAME}(?::\d+)?(?:\[CALL_ID\][\w-]*)?)\s*\Z")
_LIST_OF_CALLS = re.compile(rf"\[\s*{_NAME}\s*\(")
_NAMES = ("name", "tool_name", "tool", "function", "recipient_name")
_ARGUMENTS = ("arguments", "parameters", "args", "params", "kwargs", "input")
_SAYS_ARGUMENTS = re.compile(rf'["\'](?:{"|".join(_ARGUMENTS)})["\']\s*:')
_MIDST = "it stands in the midst of other words; write it alone, with the marks of a call"
_BESIDES = ("type", "id", "call_id", "tool_call_id", "index", "status")
_DESCRIBES = ("description", "input_schema", "inputSchema")
"""What stands beside the name of a tool that is described, and not called."""
_SCHEMA = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "description",
    "title",
    "$schema",
    "$defs",
    "definitions",
}

Found = dict[str, Any]


def read_written_calls(text: str, prefix: str, tools: list[dict[str, Any]]) -> list[Found]:
    """Return the calls of a completion in order: ``{"name", "arguments"}``, or ``{"error"}`` for one that cannot be
    read.

    Args:
        text: the completion, special tokens included.
        prefix: the end of the prompt, which may have opened the model's thinking.
        tools: the schemas of the tools. Arguments that are written as bare text have the type that a schema gives them,
            and what has no mark around it is a call only if it names one of the tools.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {one["name"]: one.get("parameters") or {} for one in functions}
    begins = _HARMONY.match(text) and ("<|channel|>" in text or text.lstrip().startswith("to=functions."))
    if begins:
        calls = _Harmony(text, schemas).read()
    else:
        calls = _Reader(text, schemas).read(prefix)
        if not calls and _HARMONY_CALL.search(text):
            calls = _Harmony(text, schemas).read()
    if len(calls) > MOST:  # one mark may be around thousands
        calls[MOST:] = [{"error": f"there are more than {MOST} calls; what follows is not read"}]
    return calls


def call_of(value: Any, own: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call that is a JSON object, whatever it calls its arguments.

    ``own`` are the names of the arguments that the tool takes, by which a call is known from the tool's description.

    >>> call_of({"name": "add", "parameters": {"a": 1}})
    ('add', {'a': 1})

    Raises:
        Described: it describes a tool, as the prompt does, and calls none.
        Unreadable: it does not have the form of a call, or it is not clear what its arguments are.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**{key: value[key] for key in value if key != "function"}, **value["function"]}
    names = [key for key in _NAMES if isinstance(value, dict) and isinstance(value.get(key), str)]
    if not names:
        raise Unreadable('it is not an object with "name" and "arguments"')
    args = {key: value[key] for key in _ARGUMENTS if value.get(key) not in (None, {}, "")}
    described = set(args) <= {"parameters"} and any(key in value for key in _DESCRIBES)
    if any(_is_schema(one, own) for one in args.values()) or (described and _all_schemas(args.get("parameters", {}))):
        raise Described("it describes a tool; a call has the values of its arguments")
    if described:
        raise Unreadable('a description stands beside its parameters; a call has "name" and "arguments" only')
    others = [key for key in value if key not in (names[0], *_ARGUMENTS, *_BESIDES, *_DESCRIBES)]
    if len(args) > 1 or (not args and others):
        words = ", ".join(map(str, [*args, *others]))[:80]
        raise Unreadable(f'its arguments must stand under "arguments", and it has {words}')
    arguments: Any = next(iter(args.values()), {})
    if isinstance(arguments, str):
        arguments = whole_value(arguments)
    if not isinstance(arguments, dict):
        raise Unreadable(f"its arguments are not an object: {str(arguments)[:80]}")
    return value[names[0]], arguments


def _is_schema(value: Any, names: Iterable[str]) -> bool:
    """Return whether ``value`` is a JSON schema of arguments, and not an object of a tool's ``own`` arguments."""
    return (
        isinstance(value, dict)
        and value.get("type") == "object"
        and set(value) <= _SCHEMA
        and not set(value) <= set(names)
    )


def _all_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


class Described(Unreadable):
    """An object describes a tool, as the prompt does, and calls none."""


class _Unclear(Unreadable):
    """It is not clear where a call ends. Nothing before ``following`` is read as a call."""

    def __init__(self, why: str, following: int):
        super().__init__(why)
        self.following = following


class _NoForm(Unreadable):
    """Other words stand where a call would."""


class _Reader:
    """Reads the text of one completion from left to right."""

    def __init__(self, text: str, schemas: Mapping[str, Any], thinks: bool = False):
        self.text, self.schemas, self.thinks = text, schemas, thinks
        self.calls: list[Found] = []
        self.place = self.said_from = self.tried = 0
        self.unclosed = -1
        """Where the last call ended, if it has no mark at its end."""
        self.last: dict[str, int] = {}
        """Where the marks in :data:`TOLD` that end something stand for the last time."""
        self.thought = False
        """Whether the model's thinking has ended, so that a further mark of its end ends nothing."""
        self.nested = False
        """Whether the last thinking was begun once more within, so that a further mark of its end ends it."""

    def read(self, prefix: str = "") -> list[Found]:
        if end := end_of_begun_thought(prefix):
            self._past_thinking(0, end)
        while (match := _SCAN.search(self.text, self.place)) is not None:
            if self.tried == MOST:
                self._refuse(f"there are more than {MOST} calls; what follows is not read")
                break
            self._take(match)
        if not self.calls:
            self._take_python()
        return self.calls

    def _take(self, match: re.Match[str]) -> None:
        kind = match.lastgroup
        if kind == "think":
            self._past_thinking(match.end(), THINKING[match[0]])
        elif kind == "thought":
            if not self.thought:  # nobody has opened it; all before it may have been thinking
                called = not self.nested and any("error" not in call for call in self.calls)
                self.calls.clear()
                if called:
                    self._refuse(IN_THOUGHT)
                self.said_from = match.end()
            self.place, self.thought = match.end(), True
        elif kind == "told":
            end = TOLD[match[0]]
            if end not in self.last:
                self.last[end] = self.text.rfind(end)
            ends = self.last[end] >= match.end()
            self.place = self.text.find(end, match.end()) + len(end) if ends else self._limit(match.end())
        elif kind == "close":
            self._take_close(match)
        elif kind == "line" and (match["react"] or match["called"]) not in self.schemas:
            self.place = match.end()
        else:
            self.tried += 1
            takers = {"mark": self._take_mark, "function": self._take_function, "line": self._take_line}
            takers.get(kind or "", self._take_inside if kind == "inside" else self._take_bare)(match)

    def _past_thinking(self, start: int, end: str) -> None:
        stop = self.text.find(end, start)
        if stop < 0:  # all that follows is thinking: a call in there is not read, and its author ought to know
            if not self.thinks and any(
                "error" not in call for call in _Reader(self.text[start:], self.schemas, thinks=True).read()
            ):
                self._refuse(IN_THINKING + end)
            self.place = len(self.text)
        else:
            self.place = stop + len(end)
            # what opens it once more within it may end it once more
            self.nested = any(other == end and mark in self.text[start:stop] for mark, other in THINKING.items())
            self.thought = not self.nested
        self.said_from = self.place

    def _refuse(self, why: str) -> None:
        self.calls.append({"error": why[:240]})

    def _add(self, name: str, arguments: dict[str, Any]) -> None:
        self.calls.append({"name": name, "arguments": arguments})

    def _take_mark(self, match: re.Match[str]) -> None:
        """Read what stands after a mark, up to the mark that ends it or to the end of what was read."""
        start, close = past_space(self.text, match.end()), MARKS[match[0]]
        if self.unclosed == match.start() and _TEXT_END.match(self.text, start):  # it ends the call before it
            self.place = start
            return
        if _OPENS.match(self.text, start):  # a mark around several calls, each of which has its own
            self.place = start
            return
        before = len(self.calls)
        fence = _FENCE.match(self.text, start) if close != "```" else None
        try:
            end = past_space(self.text, self._body(fence.end() if fence else start, close))
            unknown = any(call["name"] not in self.schemas for call in self.calls[before:])
            if unknown and is_named(self.text, match.start(), match.end()):
                raise _NoForm("it names no tool")
            if fence and self.text.startswith("```", end):
                end = past_space(self.text, end + 3)
            if close and self.text.startswith("}", end) and self.text.startswith(close, past_space(self.text, end + 1)):
                end = past_space(self.text, end + 1)  # one brace too many
        except Unreadable as error:
            del self.calls[before:]
            after = match.end() + (len(close) if self.text.startswith(close, match.end()) else 0)
            if isinstance(error, _NoForm) and is_named(self.text, match.start(), after):
                self.place = after
                return
            self._refuse(str(error))
            self.place = error.following if isinstance(error, _Unclear) else self._past_broken(match.end(), close)
            return
        if not close:
            self.place = end
        elif self.text.startswith(close, end):
            self.place = end + len(close)
        elif (stop := self.text.find(close, end, self._limit(end))) >= 0:
            del self.calls[before:]
            self._refuse(f"other words stand between the call and {close}")
            self.place = stop + len(close)
        else:  # its end mark is missing, but all of the call is there
            self.place = self.unclosed = end

    def _limit(self, place: int) -> int:
        match = _LIMIT.search(self.text, place)
        return len(self.text) if match is None else match.start()

    def _past_broken(self, place: int, close: str) -> int:
        """Return where to read on after a call that cannot be read and begins before ``place``."""
        limit = self._limit(place)
        stop = self.text.find(close, place, limit) if close else -1
        return limit if stop < 0 else stop + len(close)

    def _body(self, place: int, close: str) -> int:
        """Read the calls that begin at ``place``, in whichever way they are written. Return the place after them."""
        first = self.text[place : place + 1]
        if not first or (close and self.text.startswith(close, place)):
            raise _NoForm("nothing stands in it")
        if _LIST_OF_CALLS.match(self.text, place):
            return self._python_list(place)
        if first in "{[":
            return self._json(place)
        if (called := _CALLED.match(self.text, place)) is not None:
            arguments, end = read_value(self.text, called.end())
            self._add(_plain(called["name"]), arguments)
            fence = past_space(self.text, end)
            return fence + 3 if self.text.startswith("```", fence) and close != "```" else end
        if _PYTHON.match(self.text, place):
            return self._python_lines(place, bool(close))
        if (named := _NAMED.match(self.text, place)) is not None:
            name, end = named["name"], named.end()
            if self.text.startswith("{", end):
                arguments, end = read_value(self.text, end)
                self._add(name, arguments)
                return end
            if _KEY.match(self.text, end):
                arguments, end = self._parameters(name, end)
                self._check_end(end, arguments)
                self._add(name, arguments)
                return end
            if close and self.text.startswith(close, end):
                self._add(name, {})
                return end
        raise _NoForm("it does not have the form of a call")

    def _json(self, place: int) -> int:
        """Read a JSON object, a list of them, or several one after the other."""
        while True:
            value, place = read_value(self.text, place)
            if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
                value = value["tool_calls"]  # a message as APIs have it
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, dict) and len(one) == 1 and isinstance(next(iter(one.values())), dict):
                    name, arguments = next(iter(one.items()))
                    if name in self.schemas:
                        self._add(name, arguments)
                        continue
                self._add(*self._call_of(one))
            after = past_space(self.text, place)
            if self.text[after : after + 1] in (";", ","):
                after = past_space(self.text, after + 1)
            if not self.text.startswith("{", after):
                return place
            place = after

    def _call_of(self, value: Any) -> tuple[str, dict[str, Any]]:
        named = value.get("function", value) if isinstance(value, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        return call_of(value, _properties(self.schemas.get(name)) if isinstance(name, str) else ())

    def _python_lines(self, place: int, marked: bool) -> int:
        """Read calls as Python writes them, one on a line. Without marks around them a further one must name a tool."""
        while True:
            end = self._python_call(place)
            place = past_space(self.text, end)
            following = _PYTHON.match(self.text, place)
            if following is None or "\n" not in self.text[end:place]:
                return end
            if not marked and _plain(following["name"].removesuffix(".call")) not in self.schemas:
                return end

    def _python_list(self, place: int) -> int:
        place = past_space(self.text, place + 1)
        while True:
            place = past_space(self.text, self._python_call(place))
            if self.text.startswith(",", place):
                place = past_space(self.text, place + 1)
            if self.text.startswith("]", place):
                return place + 1
            if not _PYTHON.match(self.text, place):
                raise Unreadable("the list of calls has no ]")

    def _python_call(self, place: int) -> int:
        """Read ``add(a=1)``, or ``print(add(a=1))``. Arguments without a name are those of the schema, in its order."""
        match = _PYTHON.match(self.text, place)
        if match is None:
            raise Unreadable("it does not have the form of a call")
        if match["name"] == "print" and "print" not in self.schemas:
            inner = _PYTHON.match(self.text, past_space(self.text, match.end()))
            if inner is not None and inner["name"] != "print":
                end = past_space(self.text, self._python_call(inner.start()))
                if not self.text.startswith(")", end):
                    raise Unreadable("print has no end")
                return end + 1
        name = _plain(match["name"].removesuffix(".call"))
        names = list(_properties(self.schemas.get(name)))
        arguments: dict[str, Any] = {}
        place = past_space(self.text, match.end())
        while not self.text.startswith(")", place):
            keyword = _KEYWORD.match(self.text, place)
            if keyword is None and len(arguments) >= len(names):
                raise Unreadable(f"the arguments of {name} have no names")
            key = keyword[1] if keyword else names[len(arguments)]
            if key in arguments:
                raise Unreadable(f"{key} is given twice")
            arguments[key], place = read_value(self.text, keyword.end() if keyword else place)
            place = past_space(self.text, place)
            if self.text.startswith(",", place):
                place = past_space(self.text, place + 1)
            elif not self.text.startswith(")", place):
                raise Unreadable(f"the arguments of {name} have no end")
        self._add(name, arguments)
        return place + 1

    def _take_function(self, match: re.Match[str]) -> None:
        """Read ``<function=add>`` with its parameters, or with JSON."""
        begun = _FUNCTION.match(self.text, match.start())
        written: dict[str, Any] = {}
        try:
            if begun is None:
                raise Unreadable("it names no tool")
            name, place = begun["name"], past_space(self.text, begun.end())
            if self.text.startswith("{", place):
                arguments, place = read_value(self.text, place)
                place = past_space(self.text, place)
                if not isinstance(arguments, dict):
                    raise Unreadable("its arguments are not an object")
            else:
                arguments, place = self._parameters(name, place)
                written = arguments
            end = _FUNCTION_END.match(self.text, past_space(self.text, place))
            place = end.end() if end else place
            if end is None and not _TEXT_END.match(self.text, place) and not self._closed_at(place):
                raise Unreadable("it has no end")
            self._check_end(place, written)
        except Unreadable as error:
            real = _NEXT_CALL.match(self.text, match.start())  # and no word of it in other words
            after = begun.end() if begun else self.text.find(">", match.end()) + 1 or len(self.text)
            if real is None and is_named(self.text, match.start(), after):
                self.place = after
                return
            self._refuse(str(error))
            self.place = self._next_call(match.end()) if real else self._limit(match.end())
            return
        self._add(_plain(name), arguments)
        self._past_end(place)

    def _past_end(self, place: int) -> None:
        """Read on after a call that ends at ``place``, and after its end mark, which may be missing."""
        close = self._closed_at(place)
        self.place = past_space(self.text, place) + len(close)
        self.unclosed = -1 if close else self.place

    def _check_end(self, place: int, arguments: Mapping[str, Any]) -> None:
        """Check that no end mark of an argument follows where one is a bare text, which may be cut.

        It would then end there. A number ends where it ends, whatever follows.
        """
        following = self._next_call(place)
        texts = any(isinstance(value, str) for value in arguments.values())
        if texts and (stray := _STRAY.search(self.text, place, following)):
            raise _Unclear(f"{stray[0]} stands in an argument, so that it is not clear where this ends", following)

    def _next_call(self, place: int) -> int:
        """Return where the next call with named parameters begins. What is before it may be a part of this one."""
        following = _NEXT_CALL.search(self.text, place)
        return following.start() if following else len(self.text)

    def _closed_at(self, place: int) -> str:
        """Return the mark that ends a call and stands at ``place``, or an empty text."""
        place = past_space(self.text, place)
        return next((close for close in _CLOSERS if self.text.startswith(close, place)), "")

    def _parameters(self, name: str, place: int) -> tuple[dict[str, Any], int]:
        """Return the parameters from ``place`` on, each as its schema wants it, and the place after them."""
        schema = self.schemas.get(name)
        arguments: dict[str, Any] = {}
        while (begun := _PARAMETER.match(self.text, past_space(self.text, place))) is not None:
            key = (begun["key"] or begun["other"]).strip()
            end = (_PARAMETER_END if begun["key"] else _VALUE_END).search(self.text, begun.end())
            tag = _NEXT_TAG.search(self.text, begun.end(), end.start() if end else len(self.text))
            another = tag is not None and self._begins_another(tag.end(), schema, {*arguments, key})
            if tag is not None and (end is None or another):  # the end of this parameter is missing
                kinds = kinds_of(_properties(schema).get(key), schema)
                if _PARAMETER.match(self.text, tag.end()) and (not kinds or "string" in kinds):
                    raise Unreadable(f"the parameter {key} has no end")  # or a text has such a mark in it
                stop, place = tag.start(), tag.end()
            elif end is not None:
                stop, place = end.start(), end.end()
            else:
                raise Unreadable(f"the parameter {key} has no end")
            if key in arguments:
                raise Unreadable(f"{key} is given twice")
            arguments[key] = typed(_trimmed(self.text[begun.end() : stop]), _properties(schema).get(key), schema)
        ended = _FUNCTION_END.match(self.text, past_space(self.text, place)) or _TEXT_END.match(self.text, place)
        if not ended and not self._closed_at(place):
            raise Unreadable("other words stand between its parameters")
        return arguments, place

    def _begins_another(self, place: int, schema: Any, keys: set[str]) -> bool:
        begun = _PARAMETER.match(self.text, place)
        key = begun and (begun["key"] or begun["other"]).strip()
        return bool(key) and key in _properties(schema) and key not in keys

    def _take_inside(self, match: re.Match[str]) -> None:
        """Read a call whose opening mark is missing, by what stands in its middle."""
        start = match.start()
        if match[0] != "call:":
            before = _BEFORE.search(self.text, max(self.said_from, start - 160), start)
            start = start if before is None else before.start()
        count = len(self.calls)
        try:
            end = self._body(start, "")
            if any(call["name"] not in self.schemas for call in self.calls[count:]):
                raise Unreadable("the mark at its beginning is missing")
            if not self._closed_at(end) and not _begins_line(self.text, start):
                raise Unreadable(_MIDST)
            self._past_end(end)
        except Unreadable as error:
            del self.calls[count:]
            if isinstance(error, _NoForm) and is_named(self.text, start, match.end()):
                self.place = match.end()
                return
            self._refuse(str(error))
            self.place = error.following if isinstance(error, _Unclear) else self._limit(match.end())

    def _take_close(self, match: re.Match[str]) -> None:
        """Read a call that has an end mark only. One that ends several calls stands after these."""
        self.place = match.end()
        if self.calls:
            return
        self.tried += 1
        if not self._take_python(match.start()) and not is_named(self.text, match.start(), match.end()):
            self._refuse(f"{match[0]} ends a call that begins nowhere")

    def _take_bare(self, match: re.Match[str]) -> None:
        """Read a JSON object without marks, which is a call if it names a tool and begins its line."""
        start, count = match.start(), len(self.calls)
        named = self._named_near(start)
        try:
            end = self._json(start)
        except Described:
            silent = count == len(self.calls)
            del self.calls[count:]
            self.place = read_value(self.text, start)[1] if silent else self._limit(match.end())
            if not silent:
                self._refuse("a call stands among the descriptions of tools")
            return
        except Unreadable as error:
            del self.calls[count:]
            self.place = match.end()
            if named:
                self._refuse(str(error))
                self.place = self._limit(match.end())
            return
        calls = self.calls[count:]
        del self.calls[count:]
        self.place = end
        if any(call["name"] not in self.schemas for call in calls) or not _SAYS_ARGUMENTS.search(self.text, start, end):
            return
        if not _begins_line(self.text, start):
            self._refuse(_MIDST)
            return
        self.calls += calls
        self._past_end(end)

    def _take_line(self, match: re.Match[str]) -> None:
        """Read the arguments below or after a line that names a tool.

        With no other mark, it is a call only if it gives arguments that the tool has, and no words follow it.
        """
        name, bare = match["react"] or match["called"], match.start("called") == match.start()
        schema = self.schemas[name]
        self.place = match.end()
        try:
            arguments, end = read_value(self.text, match.end())
            if not isinstance(arguments, dict):
                raise Unreadable(f"its arguments are not an object: {str(arguments)[:80]}")
        except Unreadable as error:
            words, only = _WORDS.match(self.text, match.end()), _only_text(schema)
            if match["react"] and words and only:
                self._add(name, {only: words[1].strip().strip('"')})
                self.place = words.end()
            elif not bare:
                self._refuse(str(error))
            return
        if not bare or (set(arguments) <= set(_properties(schema)) and not _SAID.match(self.text, end)):
            self._add(name, arguments)
            self._past_end(end)

    def _named_near(self, start: int) -> bool:
        """Return whether the JSON at ``start`` seems to name a tool, even if it is broken."""
        near = re.search(r'"(?:name|tool_name|tool)"\s*:\s*"([^"]{1,128})"', self.text[start : start + 300])
        return near is not None and near[1] in self.schemas

    def _take_python(self, stop: int | None = None) -> bool:
        """Read a completion that is nothing but ``[add(a=1)]`` or ``add(a=1)``. Return whether it is."""
        start = past_space(self.text, self.said_from)
        first = re.compile(rf"\[?\s*(?P<name>{_NAME})\s*\(").match(self.text, start)
        if first is None or _plain(first["name"].removesuffix(".call")) not in self.schemas:
            return False
        count = len(self.calls)
        try:
            end = self._body(start, "")
        except Unreadable as error:
            del self.calls[count:]
            if self.text.startswith("[", start):
                self._refuse(str(error))
                return True
            return False
        after = _TEXT_END.match(self.text, end)
        if (stop is None and after is None) or (stop is not None and past_space(self.text, end) != stop):
            del self.calls[count:]
            return False
        return True


class _Harmony(_Reader):
    """Reads the messages of gpt-oss. A call is a message with a recipient, which stands in its header."""

    _MARK = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
    _LAST = re.compile(r"<\|(?:end|call|return|start)\|>")
    _TO = re.compile(r"\bto=([^\s<]+)")

    def read(self, prefix: str = "") -> list[Found]:
        place, role, begin = 0, "assistant", -1
        while place < len(self.text):
            if self.tried == MOST:
                self._refuse(f"there are more than {MOST} calls; what follows is not read")
                break
            if begin < place:
                begin = self.text.find("<|message|>", place) % (
                    len(self.text) + 1
                )  # of -1 this makes the end of the text
            last = self._LAST.search(self.text, place)
            while last is not None and last[0] == "<|start|>" and not self.text[place : last.start()].strip():
                place, role = last.end(), ""  # the header says who speaks
                last = self._LAST.search(self.text, place)
            if begin == len(self.text) or (last is not None and last.start() < begin):
                self._headless(self.text[place : last.start() if last else len(self.text)])
                if last is None:
                    break
                place = last.end() if last[0] != "<|start|>" else last.start()
                continue
            header = self.text[place:begin]
            mine = role == "assistant" or header.lstrip().startswith("assistant")
            place, role = self._message(header, begin + len("<|message|>"), mine), "assistant"
        return self.calls

    def _headless(self, words: str) -> None:
        if (to := self._TO.search(words)) is not None and to[1] != "assistant":
            self._refuse("its header has no <|message|>")

    def _message(self, header: str, start: int, mine: bool) -> int:
        """Read one message. Return the place after it."""
        to = self._TO.search(header)
        recipient = to[1] if to else ""
        last = self._LAST.search(self.text, start)
        stop, end = (last.start(), last.end()) if last else (len(self.text), len(self.text))
        if last is not None and last[0] == "<|start|>":
            end = stop
        called = last is not None and last[0] == "<|call|>"
        if not mine or recipient in ("assistant", "user", "self"):
            return end
        if not recipient:
            if called:
                self.tried += 1
                self._refuse("its header names no tool, as in to=functions.NAME")
            elif re.search(r"<\|channel\|>\s*(analysis)", header) is None:
                self.calls += _Reader(self.text[start:stop], self.schemas).read()
            return end
        self.tried += 1
        name = _plain(recipient)
        if not self.text[start:stop].strip() and name in self.schemas and not _needed(self.schemas[name]):
            self._add(name, {})
            return end
        try:
            value, after = read_value(self.text, start)
        except Unreadable as error:
            only = _only_text(self.schemas.get(name))
            if only is not None and not recipient.startswith("functions."):
                self._add(name, {only: self.text[start:stop]})
            else:
                self._refuse(str(error))
            return end
        after = past_space(self.text, after)
        ended = self._LAST.match(self.text, after)
        if not isinstance(value, dict):
            self._refuse(f"its arguments are not an object: {str(value)[:80]}")
        elif ended is None and after < len(self.text):
            self._refuse("other words stand after its arguments")
        else:
            self._add(name, value)
            return len(self.text) if ended is None else ended.end() if ended[0] != "<|start|>" else ended.start()
        last = self._LAST.search(self.text, after)
        return len(self.text) if last is None else last.end() if last[0] != "<|start|>" else last.start()


def is_named(text: str, start: int, end: int) -> bool:
    """Return whether words only name the mark from ``start`` to ``end``, as in "I use ``<call>`` for this"."""
    return _SAID.match(text, end) is not None and not _begins_line(text, start)


def _begins_line(text: str, start: int) -> bool:
    """Return whether nothing but marks stands before ``start`` in its line."""
    line = text[max(0, start - 160) : start].rpartition("\n")[2].strip()
    return not line or line.endswith((">", "```", "```json", ";"))


def _plain(name: str) -> str:
    """Return the name of a tool without the name spaces that models write before it."""
    return name.removeprefix("functions.").removeprefix("default_api.")


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _needed(schema: Any) -> list[str]:
    needed = schema.get("required") if isinstance(schema, dict) else None
    return needed if isinstance(needed, list) else []


def _only_text(schema: Any) -> str | None:
    """Return the only required argument of a tool, if it is a text."""
    needed = _needed(schema)
    return (
        needed[0] if len(needed) == 1 and kinds_of(_properties(schema).get(needed[0]), schema) == {"string"} else None
    )


def _trimmed(text: str) -> str:
    """Return ``text`` without the line ends that a template writes around a value."""
    return text.removeprefix("\n").removesuffix("\n")


def typed(text: str, schema: Any, root: Any) -> Any:
    """Return an argument that was written as bare ``text``, as its ``schema`` wants it. ``root`` is the tool's whole
    schema.

    >>> typed("75001", {"type": "string"}, {}), typed("75001", {"type": "integer"}, {}), typed("x", {"type": "integer"}, {})
    ('75001', 75001, 'x')
    """  # noqa: E501
    kinds = kinds_of(schema, root)
    if "null" in kinds and text.strip() in ("null", "None"):
        return None
    if not kinds or "string" in kinds:
        return text
    try:
        return whole_value(text)
    except Unreadable:
        return text.strip()


KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def kinds_of(schema: Any, root: Any) -> set[str]:
    """Return the types of JSON that a value may have by ``schema``, or an empty set if it may have any.

    References and alternatives are followed inside of ``root``, and no further than 32 of them.
    """
    kinds: set[str] = set()
    waiting, seen = [schema], 0
    while waiting and seen < 32:
        one, seen = waiting.pop(), seen + 1
        if not isinstance(one, dict):
            return set()
        named = one.get("type")
        if isinstance(named, str) or (isinstance(named, list) and named):
            kinds |= {named} if isinstance(named, str) else {str(kind) for kind in named}
            kinds |= {"null"} if one.get("nullable") is True else set()
        elif isinstance(one.get("enum"), list) and one["enum"]:
            kinds |= {KINDS.get(type(value), "string") for value in one["enum"]}
        elif "const" in one:
            kinds |= {KINDS.get(type(one["const"]), "string")}
        elif isinstance(one.get("$ref"), str):
            waiting.append(referred(one["$ref"], root))
        else:
            parts: list[Any] = next(
                (one[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(one.get(key), list)), []
            )
            if not parts:
                return set()
            waiting += parts
    return kinds


def referred(reference: str, root: Any) -> Any:
    """Return the part of the schema ``root`` that a local ``reference`` names, or None."""
    if not reference.startswith("#"):
        return None
    part = root
    for name in reference[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part
