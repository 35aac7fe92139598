"""Anthropic's messages on the wire: read into the request of a chat completion, and answered in Anthropic's words.

Data flow: JSON of a client -> :func:`read_message` -> :class:`~maporl.serving.wire.ChatRequest`; an utterance ->
:func:`message` or :func:`events`; a :class:`~maporl.serving.wire.Refused` -> :func:`error`. A conversation in this form
and the same in OpenAI's reach an agent as equal messages. The results of tools are messages of their own, and nothing
but their texts says that a tool failed (``is_error``).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maporl.errors import one_line
from maporl.serving.wire import (
    ChatRequest,
    Refused,
    check_fields,
    content_text,
    fields_of,
    flat_form,
    read_chat,
    reply_message,
    token_usage,
)
from maporl.types import Stop, Utterance

SAME = ("max_tokens", "metadata", "model", "service_tier", "stream", "temperature", "top_k", "top_p")
"""Fields that chat completions have too."""
READ = frozenset({"messages", "system", "tools"})
WITHOUT_EFFECT = frozenset({"cache_control", "inference_geo", "speed", "user_profile_id"})
"""Fields that change nothing that a reply says."""
NEUTRAL: dict[str, Any] = {"output_config": {}, "thinking": {"type": "disabled"}}
"""Fields of which only the value that changes nothing can be had."""
BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}
"""The kinds of blocks that a message of each role may have."""
OF_TOOLS = frozenset(
    {"cache_control", "description", "eager_input_streaming", "input_schema", "name", "strict", "type"}
)
"""The fields of a tool that change nothing, or are read."""
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""The kinds of errors by their status. Others are ``invalid_request_error``, or ``api_error`` from 500 on."""
UNCOUNTED = (
    "count_tokens: an agent's tokens are counted when it is asked, and not before; leave the call out: "
    "usage.input_tokens of the reply has their number, and a prompt that does not fit the context is refused"
)


def read_message(body: Any, agents: Sequence[str], ignored: Sequence[str] = ()) -> ChatRequest:
    """Return the request in the JSON ``body`` of a message. The arguments are those of
    :func:`~maporl.serving.wire.read_chat`; ``ignored`` may have names of chat completions too, such as
    ``parallel_tool_calls``.

    Raises:
        Refused: it is malformed, asks an unknown agent, or for something that cannot be had.
    """
    fields = fields_of(body, ignored)
    if body.get("thread") is not None:  # without it a request may be a part of a conversation, so it is never ignored
        why = "thread: nothing is stored; send the whole conversation, as a tool runner with thread=False does"
        raise Refused(why, "thread", code="thread_unsupported_request")  # at which clients send it by themselves
    chat: dict[str, Any] = {}
    faults: list[tuple[str, str]] = []
    for name, value in fields.items():
        if name in SAME:
            chat[name] = value
        elif name == "tool_choice":
            chat |= _choice(value, faults)
        elif name == "output_config" and isinstance(value, Mapping) and not {*value} - {"format"}:
            chat |= flat_form(name, value.get("format"), faults)
        elif name == "stop_sequences":
            if isinstance(value, list) and all(isinstance(one, str) and one for one in value):
                chat["stop"] = value
            else:
                faults.append((name, f"expected texts that are not empty, got {one_line(json.dumps(value), 80)}"))
        elif name in NEUTRAL:
            if value != NEUTRAL[name]:
                faults.append((name, f"{one_line(json.dumps(value), 80)} is not supported"))
        elif name not in READ and name not in WITHOUT_EFFECT:
            faults.append((name, "this field is not supported"))
    chat = {name: value for name, value in chat.items() if name not in ignored}
    check_fields(chat, agents, faults)
    chat["messages"] = _messages(fields.get("system"), fields.get("messages"))
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    return read_chat(chat, agents)


def _choice(choice: Any, faults: list[tuple[str, str]]) -> dict[str, Any]:
    """Return a ``tool_choice`` as fields of a chat completion. What of it can be had is decided there."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    single = choice.get("disable_parallel_tool_use") or False if isinstance(choice, Mapping) else False
    if kind not in ("auto", "any", "tool", "none") or not isinstance(single, bool):
        expected = '{"type": "auto"}, or any, tool or none, with "disable_parallel_tool_use" as true or false'
        faults.append(("tool_choice", f"expected {expected}, got {one_line(json.dumps(choice), 80)}"))
        return {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    said = {"any": "required", "tool": named}.get(kind, kind)
    return {"tool_choice": said} | ({"parallel_tool_calls": False} if single else {})


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a message as those of a chat completion."""
    if not isinstance(tools, list):
        raise Refused(f"tools: expected a list, got {tools!r:.80}", "tools", code="invalid_type")
    read = []
    for number, tool in enumerate(tools):
        own = isinstance(tool, Mapping) and tool.get("type") in (None, "custom") and isinstance(tool.get("name"), str)
        if not own or not isinstance(tool.get("input_schema"), Mapping):
            expected = '{"name": ..., "input_schema": ...}'
            raise Refused(f"tools.{number}: expected {expected}, got {one_line(json.dumps(tool), 80)}", "tools")
        if unknown := [name for name, value in tool.items() if value and name not in OF_TOOLS]:
            raise Refused(f"tools.{number}.{unknown[0]}: this field is not supported", "tools")
        function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        read.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return read


def _messages(system: Any, given: Any) -> list[dict[str, Any]]:
    """Return a system prompt and messages of blocks as the messages of a chat completion."""
    begins = content_text(system, "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": begins}] if begins else []
    if not isinstance(given, list) or not given:
        raise Refused(f"messages: expected a list of messages, got {given!r:.80}", "messages", code="invalid_type")
    called: set[str] = set()
    role = None
    for number, one in enumerate(given):
        where = f"messages.{number}"
        role = one.get("role") if isinstance(one, Mapping) else one
        if not isinstance(role, str) or role not in BLOCKS:
            raise Refused(f"{where}.role: expected one of {sorted(BLOCKS)}, got {role!r:.80}", where)
        content = one.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise Refused(
                f"{where}.content: expected a text or blocks, got {content!r:.80}", where, code="invalid_type"
            )
        messages += _turn(role, blocks, where, called)
    if role == "assistant":
        raise Refused(
            f"{where}: the last message is an assistant's, and an answer does not go on from given words; end with a "
            "message of the user",
            where,
        )
    return messages


def _turn(role: str, blocks: Sequence[Any], where: str, called: set[str]) -> list[dict[str, Any]]:
    """Return the blocks of one message as messages of a chat completion, and add the ids of calls to ``called``."""
    turn: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        at = f"{where}.content.{number}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in BLOCKS[role]:
            got = f"{kind if kind else block!r:.80}"
            raise Refused(f"{at}.type: only {' and '.join(BLOCKS[role])} are supported here, got {got}", where)
        if kind == "tool_result":
            name = block.get("tool_use_id")
            if str(name) not in called:
                raise Refused(f"{at}.tool_use_id: no message before it has the call {name!r:.80}", where)
            result = content_text(block.get("content"), where, f"content.{number}.content")
            turn.append({"role": "tool", "tool_call_id": name, "content": result})
            continue
        if not turn or turn[-1]["role"] != role:
            turn.append({"role": role, "content": ""})
        if kind == "text":
            if not isinstance(block.get("text"), str):
                raise Refused(f"{at}.text: expected a text, got {block.get('text')!r:.80}", where, code="invalid_type")
            turn[-1]["content"] += block["text"]
            continue
        if not all(isinstance(block.get(name), str) for name in ("id", "name")) or "input" not in block:
            raise Refused(
                f"{at}: expected a call with id, name and input, got {one_line(json.dumps(block), 80)}", where
            )
        function = {"name": block["name"], "arguments": json.dumps(block["input"])}
        turn[-1].setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        called.add(block["id"])
    return turn or [{"role": role, "content": ""}]


def message(utterance: Utterance, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return an utterance as a message. ``name`` is its id. ``created``, the time, is not told in this form."""
    said, usage = reply_message(utterance, request), token_usage(utterance)
    content: list[dict[str, Any]] = [] if said["content"] is None else [{"type": "text", "text": said["content"]}]
    for call in said.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    sequence = None if "tool_calls" in said else _sequence(utterance, request)
    reason = {Stop.LENGTH: "max_tokens", Stop.FILTERED: "refusal"}.get(utterance.stop, "end_turn")
    return {
        "id": name, "type": "message", "role": "assistant", "model": utterance.agent, "content": content,
        "stop_reason": "tool_use" if "tool_calls" in said else "stop_sequence" if sequence else reason,
        "stop_sequence": sequence,
        "usage": {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip


def _sequence(utterance: Utterance, request: ChatRequest) -> str | None:
    """Return the stop sequence of the request that has ended an utterance, whose text has no space around it."""
    ends = request.sampling.at(0).get("stop", ()) if utterance.stop is Stop.STOP and request.sampling else ()
    written = [end for end in ends if end in utterance.text]
    return next(iter(written or [end for end in ends if utterance.text.endswith(end.strip())]), None)


def events(utterance: Utterance, request: ChatRequest, name: str, created: int) -> Iterator[dict[str, Any]]:
    """Yield an utterance as the events of a stream."""
    whole = message(utterance, request, name, created)
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": {**whole, **begun}}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def error(refused: Refused) -> dict[str, Any]:
    """Return Anthropic's error object, with the word for programs among its details."""
    kind = ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    details = {"error_code": refused.code}
    return {"type": "error", "error": {"type": kind, "message": refused.message, "details": details}}
