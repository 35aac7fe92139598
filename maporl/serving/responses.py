"""OpenAI's responses on the wire, as far as clients that keep the conversation themselves use them.

Data flow: JSON of a client -> :func:`read_response` -> :class:`~maporl.serving.wire.ChatRequest`; an utterance ->
:func:`response` or :func:`events`. A response is not stored, so that nothing can name an earlier one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maporl.errors import one_line
from maporl.serving.wire import NEUTRAL as CHAT_NEUTRAL
from maporl.serving.wire import (
    ROLES,
    WITHOUT_EFFECT,
    ChatRequest,
    Refused,
    check_fields,
    content_text,
    fields_of,
    flat_form,
    read_chat,
    reply_message,
    token_logprobs,
    token_usage,
    without_nothing,
)
from maporl.types import Stop, Utterance

SAME = frozenset(
    {"model", "parallel_tool_calls", "seed", "stream", "temperature", "top_k", "top_logprobs", "top_p"}
    | WITHOUT_EFFECT
    | (CHAT_NEUTRAL.keys() - {"response_format"})
)
"""Fields that chat completions have too."""
READ = frozenset({"include", "input", "instructions", "max_output_tokens", "tool_choice", "tools"})
UNREAD = frozenset({"client_metadata", "max_tool_calls"})
"""What Codex says of itself, and a limit of calls of a provider's own tools, which do not exist here."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "n": (1,),
    "reasoning": ({}, {"effort": "none"}),
    "text": tuple(
        form | length for form in ({}, {"format": {"type": "text"}}) for length in ({}, {"verbosity": "medium"})
    ),
    "truncation": ("disabled",),
}
"""Fields of which only the values that change nothing can be had. Of mappings, what is null does not count."""
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What ``include`` may name."""
WHOLE = ", and nothing is stored: send the whole conversation as input"
INSTEAD = {"conversation": WHOLE, "previous_response_id": WHOLE}


def read_response(body: Any, agents: Sequence[str], ignored: Sequence[str] = ()) -> ChatRequest:
    """Return the request in the JSON ``body`` of a response. The arguments are those of
    :func:`~maporl.serving.wire.read_chat`.

    Raises:
        Refused: it is malformed, asks an unknown agent, or for something that cannot be had.
    """
    fields = fields_of(body, ignored)
    faults = []
    for name, value in fields.items():
        if name == "text" and isinstance(value, Mapping):
            if {key for key, one in value.items() if one and (key, one) != ("verbosity", "medium")} - {"format"}:
                faults.append((name, f"{one_line(json.dumps(value), 80)} is not supported"))
        elif name == "include":
            if not isinstance(value, list) or any(one not in INCLUDED for one in value):
                faults.append(
                    (name, f"only {json.dumps(INCLUDED)} are supported, {one_line(json.dumps(value), 80)} is not")
                )
        elif name in NEUTRAL:
            if without_nothing(value) not in NEUTRAL[name]:
                faults.append((name, f"{one_line(json.dumps(value), 80)} is not supported"))
        elif name not in SAME | READ | UNREAD:
            faults.append((name, f"this field is not supported{INSTEAD.get(name, '')}"))
    chat = {name: fields[name] for name in fields if name in SAME or name == "tool_choice"}
    chat["logprobs"] = bool(chat.get("top_logprobs")) or LOGPROBS in json.dumps(fields.get("include"))
    text = fields.get("text")
    chat |= flat_form("text", text.get("format") if isinstance(text, Mapping) else None, faults)
    if isinstance(choice := chat.get("tool_choice"), Mapping) and choice.get("type") == "function":
        chat["tool_choice"] = {"function": {"name": choice.get("name")}}
    check_fields(chat, agents, faults)
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    chat["messages"] = _messages(fields.get("instructions"), fields.get("input"))
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    return read_chat(chat, agents)


def _tools(tools: Any) -> Any:
    """Return the tools of a response as those of a chat completion."""
    if not isinstance(tools, list):
        raise Refused(f"tools: expected a list, got {tools!r:.80}", "tools", code="invalid_type")
    flat = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            expected = '{"type": "function", "name": ..., "parameters": ...}'
            raise Refused(f"tools.{number}: expected {expected}, got {one_line(json.dumps(tool), 80)}", "tools")
        function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
        flat.append({"type": "function", "function": function})
    return flat


def _messages(instructions: Any, given: Any) -> list[dict[str, Any]]:
    """Return instructions and input as the messages of a chat completion. Calls are in the message beside them."""
    if instructions is not None and not isinstance(instructions, str):
        raise Refused(f"instructions: expected a text, got {instructions!r:.80}", "instructions", code="invalid_type")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refused(f"input: expected a text or a list of items, got {given!r:.80}", "input", code="invalid_type")
    called: set[str] = set()
    for number, item in enumerate(given):
        where = f"input.{number}"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":  # an agent's thoughts are in its tokens
            continue
        if kind == "message":
            if item.get("role") not in [role for role in ROLES if role != "tool"]:
                got = f"{item.get('role')!r:.80}"
                raise Refused(f"{where}.role: expected one of {sorted(set(ROLES) - {'tool'})}, got {got}", where)
            if item.get("content") is None:
                raise Refused(f"{where}.content: expected a text", where, code="invalid_type")
            content, before = content_text(item["content"], where), messages[-1] if messages else {}
            if item["role"] == "assistant" and before.get("tool_calls") and before["content"] is None:
                before["content"] = content  # a reply is one, in whichever order its items come
            else:
                messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
                raise Refused(f"{where}: expected a call with name and call_id, got {item!r:.80}", where)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item.get("arguments")}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            called.add(item["call_id"])
        elif kind == "function_call_output":
            if str(item.get("call_id")) not in called:
                raise Refused(f"{where}.call_id: no item before it is the call {item.get('call_id')!r:.80}", where)
            content = content_text(item.get("output"), where, "output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        else:
            expected = "message, function_call, function_call_output and reasoning"
            raise Refused(f"{where}.type: only {expected} are supported, got {kind if kind else item!r:.80}", where)
    return messages


def response(utterance: Utterance, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return an utterance as a response. ``name`` is its id, and ``created`` the time in seconds."""
    cut = {Stop.LENGTH: "max_output_tokens", Stop.FILTERED: "content_filter"}.get(utterance.stop)
    usage = token_usage(utterance)
    return {
        **_empty(utterance, request, name, created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": cut} if cut else None,
        "output": _output(utterance, request, name, "incomplete" if cut else "completed"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _empty(utterance: Utterance, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return a response that has only begun."""
    return {
        "id": name, "object": "response", "created_at": created, "status": "in_progress", "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "model": utterance.agent, "output": [],
        "parallel_tool_calls": request.parallel, "temperature": None, "top_p": None, "tool_choice": "auto",
        "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in request.schemas], "usage": None,
    }  # fmt: skip


def _output(utterance: Utterance, request: ChatRequest, name: str, status: str) -> list[dict[str, Any]]:
    """Return the items of a response: its text, if there is any or no call, and then its calls."""
    message = reply_message(utterance, request)
    items: list[dict[str, Any]] = []
    if message["content"] is not None:
        logprobs = token_logprobs(utterance)
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]})
    for call in message.get("tool_calls", ()):
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": status}
        items.append({**item, **call["function"]})
    return items


def events(utterance: Utterance, request: ChatRequest, name: str, created: int) -> Iterator[dict[str, Any]]:
    """Yield an utterance as the events of a stream."""
    whole = response(utterance, request, name, created)
    number = 0

    def event(kind: str, **values: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number - 1, **values}

    begun = _empty(utterance, request, name, created)
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        text = item["type"] == "message"
        empty: dict[str, Any] = {"content": []} if text else {"arguments": ""}
        yield event("output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"})
        if text:
            (part,) = item["content"]
            at["content_index"] = 0
            yield event("content_part.added", **at, part={**part, "text": "", "logprobs": []})
            yield event("output_text.delta", **at, delta=part["text"], logprobs=part["logprobs"])
            yield event("output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
            yield event("content_part.done", **at, part=part)
        else:
            yield event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)
