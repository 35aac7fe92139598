"""OpenAI's chat completions on the wire: requests are read and checked, replies and errors are written.

Data flow: JSON of a client -> :func:`read_chat` -> :class:`ChatRequest`; an utterance -> :func:`completion` or
:func:`chunks`. What a request asks for and cannot get is refused with the name of its field, and never left out.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maporl.config.imports import unknown
from maporl.decoding import Sampling, StructuredOutput
from maporl.environments.base import tool_of
from maporl.environments.calls import before_calls
from maporl.errors import ConfigError, one_line
from maporl.guard import read_json
from maporl.types import Ask, Call, Message, Stop, Utterance

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles of messages, and what they are called here."""
WITHOUT_EFFECT = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "stream_options", "user",
    }
)  # fmt: skip
"""Fields that change nothing that a reply says."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "min_p": (0,), "repetition_penalty": (1,),
    "length_penalty": (1,), "best_of": (1,), "use_beam_search": (False,), "min_tokens": (0,), "ignore_eos": (False,),
    "echo": (False,), "skip_special_tokens": (True,), "stop_token_ids": ([],), "bad_words": ([],),
    "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "add_special_tokens": (False,),
    "continue_final_message": (False,), "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,), "modalities": (["text"],), "reasoning_effort": ("none",),
    "verbosity": ("medium",), "functions": ([],), "function_call": ("auto", "none"), "web_search_options": ({},),
}  # fmt: skip
"""Fields of which only the values that change nothing can be had, those of vLLM among them. In a mapping, what is null,
0 or false changes nothing."""
DRAWN = frozenset(
    {
        "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty", "length_penalty",
        "best_of", "use_beam_search", "min_tokens", "ignore_eos", "bad_words",
    }
)  # fmt: skip
"""Those of them that change what tokens are drawn from."""
MOST_SAMPLES, MOST_ALTERNATIVES = 128, 20
"""The most that OpenAI allows of ``n`` and ``top_logprobs``."""
WHOLE = {"n": (1, MOST_SAMPLES), "top_logprobs": (0, MOST_ALTERNATIVES), "seed": (-(2**63), 2**64 - 1)}
"""Fields that are whole numbers, and their least and largest values."""
SAMPLED = ("temperature", "top_p", "top_k", "stop")
LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one limit. The later one counts."""
READ = frozenset({"messages", "model", "stream", "tools"})
MORE = "maporl"
"""The tag of an utterance with what a chat completion tells beside OpenAI's fields, under this name."""
OBJECT = {"type": "object"}
"""The JSON schema of ``response_format: {type: json_object}``."""


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        message: what is wrong, and what to do, in a line for each reason.
        param: the field.
        status: the HTTP status.
        code: a word for programs.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str = "unsupported_value"):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request for one utterance.

    Args:
        agent: who speaks, which is the ``model`` of the request.
        messages: the whole conversation. An assistant message may have ``tool_calls``, as
            ``{"name", "arguments"}`` with a mapping of arguments. A tool message has the ``name`` of its tool.
        schemas: the tools that the agent may call.
        sampling: how the answer is sampled, where the request says so.
        stream: whether the reply is sent in pieces, and ``usage`` whether the last one has the numbers of tokens.
        role: the role in which the agent speaks.
        parents: the ids of the replies whose text the messages hold. None: they are looked for.
        logprobs: whether the reply shows the log-probabilities of its tokens.
        parallel: whether it may have several calls.
        n: how many samples the reply has.
        seed: decides about its random numbers. None: the run and the request's place do.
        top: how many of the likeliest tokens are listed for each token.
        form: what the answer is held to.
        choice: ``auto``, ``required`` for a call of any tool, or the name of the tool that is called.
        strict: the tools whose arguments keep to their schemas.
    """

    agent: str
    messages: tuple[Message, ...]
    schemas: tuple[dict[str, Any], ...] = ()
    sampling: Sampling | None = None
    stream: bool = False
    usage: bool = False
    role: str | None = None
    parents: tuple[str, ...] | None = None
    logprobs: bool = False
    parallel: bool = True
    n: int = 1
    seed: int | None = None
    top: int = 0
    form: StructuredOutput | None = None
    choice: str = "auto"
    strict: tuple[str, ...] = ()


def fields_of(body: Any, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a request that have a value, but those that are ``ignored``.

    Raises:
        Refused: it is anything but a JSON object.
    """
    if not isinstance(body, Mapping):
        raise Refused("expected a JSON object", code="invalid_json")
    return {name: value for name, value in body.items() if value is not None and name not in ignored}


def read_chat(body: Any, agents: Sequence[str], ignored: Sequence[str] = ()) -> ChatRequest:
    """Return the request in the JSON ``body`` of a chat completion.

    Args:
        body: the parsed JSON.
        agents: the agents that may be asked.
        ignored: fields that are left out because the user says so.

    Raises:
        Refused: it is malformed, asks an unknown agent, or for something that cannot be had.
    """
    fields = fields_of(body, ignored)
    check_fields(fields, agents)
    options, tools = fields.get("stream_options"), _tools(fields)
    choice = _tool_choice(fields, [tool["function"]["name"] for tool in tools])
    usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    return ChatRequest(
        str(fields["model"]),
        _messages(fields.get("messages")),
        tools,
        _sampling(fields),
        bool(fields.get("stream")),
        usage,
        logprobs=fields.get("logprobs", False),
        parallel=fields.get("parallel_tool_calls", True),
        n=fields.get("n", 1),
        seed=fields.get("seed"),
        top=fields.get("top_logprobs", 0),
        form=form_of(fields.get("response_format")),
        choice=choice,
        strict=tuple(tool["function"]["name"] for tool in fields.get("tools") or () if tool["function"].get("strict")),
    )


def form_of(value: Any) -> StructuredOutput | None:
    """Return what an answer is held to by a ``response_format``, or None if by nothing.

    Raises:
        ValueError: it has another form.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    schema = OBJECT if kind == "json_object" else None
    if kind == "json_schema" and isinstance(value.get("json_schema"), Mapping):
        schema = value["json_schema"].get("schema", OBJECT)
    if not isinstance(schema, Mapping):
        expected = '{"type": "json_schema", "json_schema": {"schema": {...}}}, or the type json_object or text'
        raise ValueError(f"expected {expected}, got {one_line(json.dumps(value), 80)}")
    return StructuredOutput(json_schema=dict(schema))


def flat_form(name: str, value: Any, faults: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the format of a text, in which the schema stands beside the type, as a field of a chat completion.

    ``name`` is its own field, of which a fault is added to ``faults``.
    """
    flat = isinstance(value, Mapping) and value.get("type") == "json_schema"
    form = {"type": "json_schema", "json_schema": value} if flat else value
    try:
        return {} if form_of(form) is None else {"response_format": form}
    except ValueError as error:
        faults.append((name, str(error)))
        return {}


def _tool_choice(fields: Mapping[str, Any], tools: Sequence[str]) -> str:
    """Return ``auto``, ``required`` or the name of the tool that must be called."""
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return "auto"
    name = choice if choice == "required" else choice["function"]["name"]
    if not tools or name not in ("required", *tools):
        raise Refused(f"tool_choice: {name!r:.80} names none of the tools {list(tools)}", "tool_choice")
    return name


def check_fields(fields: Mapping[str, Any], agents: Sequence[str], faults: Iterable[tuple[str, str]] = ()) -> None:
    """Check the fields of a chat completion, but for its messages and tools. ``faults`` are others, found before.

    Raises:
        Refused: it asks an unknown agent, or for what cannot be had. All of it is named, in a line for each field.
    """
    agent, found = str(fields.get("model")), [*faults, *_faults(fields)]
    lines = [f"{name}: {why}; leave it out, or add it to protocol.ignore" for name, why in found]
    param = ", ".join(name for name, _ in found)
    if agent not in agents:
        who = f"model: {unknown(agent, list(agents))}; the model of a request is the name of an agent"
        raise Refused("\n".join([who, *lines]), "model", 404, "model_not_found")
    if found:
        raise Refused("\n".join(lines), param)


def _faults(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each field that cannot be had, and why."""
    for name, value in fields.items():
        got = f"got {one_line(json.dumps(value), 80)}"
        if name in NEUTRAL:
            if without_nothing(value) not in NEUTRAL[name]:
                own = "answers are drawn from the agent's own distribution, which is the one that is trained; "
                yield name, f"{own * (name in DRAWN)}only {json.dumps(NEUTRAL[name][0])} is supported, {got}"
        elif name in WHOLE:
            least, most = WHOLE[name]
            if type(value) is not int or not least <= value <= most:
                yield name, f"expected a whole number from {least} to {most}, {got}"
            elif name == "top_logprobs" and value and fields.get("logprobs") is not True:
                yield name, "logprobs must be true too"
        elif name in ("logprobs", "parallel_tool_calls"):
            if not isinstance(value, bool):
                yield name, f"expected true or false, got {value!r:.80}"
        elif name == "tool_choice":
            function = value.get("function") if isinstance(value, Mapping) else None
            named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
            if not named and (isinstance(value, Mapping) or value not in ("auto", "none", "required")):
                yield name, f'expected "auto", "none", "required" or {{"function": {{"name": ...}}}}, {got}'
        elif name == "response_format":
            try:
                form_of(value)
            except ValueError as error:
                yield name, str(error)
        elif name in LIMITS or name in SAMPLED:
            try:
                _sampling({name: value})
            except ValueError as error:
                yield name, str(error).partition(": ")[2]
        elif name not in READ and name not in WITHOUT_EFFECT:
            yield name, "this field is not supported"


def without_nothing(value: Any) -> Any:
    """Return a mapping without what is null, 0 or false in it. Other values stay as they are."""
    return {name: one for name, one in value.items() if one} if isinstance(value, Mapping) else value


def _sampling(fields: Mapping[str, Any]) -> Sampling | None:
    """Return how the answer is sampled, or None if the request does not say it.

    Raises:
        ValueError: a value cannot be had.
    """
    values = {"max_tokens" if name in LIMITS else name: fields[name] for name in (*SAMPLED, *LIMITS) if name in fields}
    if values.get("top_k") == -1:  # vLLM's word for all
        values["top_k"] = 0
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if values.get("stop") == []:  # the run's own stop strings stay
        del values["stop"]
    for name, value in values.items():
        if isinstance(value, list) != (name == "stop") or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name}: expected {'texts' if name == 'stop' else 'a number'}, got {value!r:.80}")
    return Sampling(**values) if values else None


def _tools(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise Refused(f"tools: expected a list, got {tools!r:.80}", "tools", code="invalid_type")
    read: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        if (
            not isinstance(tool, Mapping)
            or tool.get("type") != "function"
            or not isinstance(tool.get("function"), Mapping)
        ):
            expected = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise Refused(f"tools.{number}: expected {expected}, got {one_line(json.dumps(tool), 80)}", "tools")
        try:
            read.append(tool_of(tool).schema())
        except ConfigError as error:
            raise Refused(f"tools.{number}: {error}", "tools") from None
    return () if fields.get("tool_choice") == "none" else tuple(read)


def _messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages: expected a list of messages, got {messages!r:.80}", "messages", code="invalid_type")
    read: list[Message] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        role = message.get("role") if isinstance(message, Mapping) else message
        if not isinstance(message, Mapping) or not isinstance(role, str) or role not in ROLES:
            raise Refused(f"{where}.role: expected one of {sorted(ROLES)}, got {role!r:.80}", where)
        one: Message = {"role": ROLES[role], "content": content_text(message.get("content"), where)}
        if one["role"] == "assistant":
            one |= _said_calls(message, where, names)
        elif message.get("content") is None:
            raise Refused(f"{where}.content: expected a text", where, code="invalid_type")
        if one["role"] == "tool":
            called = str(message.get("tool_call_id"))
            if called not in names:
                raise Refused(f"{where}.tool_call_id: no message before it has the call {called!r:.80}", where)
            one["name"] = names[called]
        elif isinstance(name := message.get("name"), str) and name.strip() not in ("", one["role"]):
            # some clients write the name into the text too, and name who says nothing but a call
            one |= {} if not one["content"] or one["content"].startswith(name) else {"name": name.strip()}
        read.append(one)
    return tuple(read)


def _said_calls(message: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    """Return the calls of an assistant message, and add their ids to ``names``."""
    if message.get("function_call") is not None:
        raise Refused(f"{where}.function_call: it was replaced by tool_calls; use these", where)
    calls, written = [], message.get("tool_calls") or []
    if not isinstance(written, list):
        raise Refused(f"{where}.tool_calls: expected a list of calls, got {written!r:.80}", where, code="invalid_type")
    for call in written:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(f"{where}.tool_calls: expected calls of functions, got {call!r:.80}", where)
        try:
            arguments = read_json(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            arguments = None
        if not isinstance(arguments, Mapping):
            arguments = {"": str(function.get("arguments"))}  # another one's call, which cannot be read
        calls.append({"name": function["name"], "arguments": arguments})
        names[str(call.get("id"))] = function["name"]
    return {"tool_calls": calls} if calls else {}


def content_text(content: Any, where: str, field: str = "content") -> str:
    """Return the text of a message's content, which may come in parts. ``where`` is the message.

    Raises:
        Refused: it has other things than text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where}.{field}: expected a text, got {content!r:.80}", where, code="invalid_type")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise Refused(f"{where}.{field}: only parts of text are supported, got {kind!r:.80}", where)
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def calls_of(utterance: Utterance) -> list[tuple[str, Call]]:
    """Return the calls that a program is to carry out, each with its id."""
    return [
        (f"call_{utterance.id}_{number}", call)
        for number, call in enumerate(one for one in utterance.calls if one.result is None)
    ]


def said(utterance: Utterance, request: ChatRequest) -> Message:
    """Return an utterance as the assistant message that the program is sent.

    It lacks the text of the calls, and the stop string of the request that has ended it.
    """
    calls = [{"name": call.name, "arguments": call.arguments} for _, call in calls_of(utterance)]
    if calls:
        return {"role": "assistant", "content": before_calls(utterance.text), "tool_calls": calls}
    text = utterance.text
    if utterance.stop is Stop.STOP and request.sampling is not None:
        text = next(
            (text.removesuffix(end) for end in request.sampling.at(0).get("stop", ()) if text.endswith(end)), text
        )
    return {"role": "assistant", "content": text}


def reply_message(utterance: Utterance, request: ChatRequest) -> dict[str, Any]:
    """Return an utterance as the message of a chat completion: :func:`said`, with ids of the calls."""
    message = said(utterance, request)
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for name, call in calls_of(utterance)
    ]
    return {"role": "assistant", "content": message["content"] or (None if calls else "")} | (
        {"tool_calls": calls} if calls else {}
    )


def _finish(utterance: Utterance) -> str:
    if calls_of(utterance):
        return "tool_calls"
    return {Stop.LENGTH: "length", Stop.FILTERED: "content_filter"}.get(utterance.stop, "stop")


def token_usage(utterance: Utterance, *others: Utterance) -> dict[str, int]:
    """Return the numbers of tokens of an utterance, with ``others`` on the same prompt."""
    counts = [u.tags.get("usage") or (len(u.prompt_ids), len(u.response_ids)) for u in (utterance, *others)]
    prompt, new = counts[0][0], sum(count for _, count in counts)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def token_logprobs(utterance: Utterance) -> list[dict[str, Any]]:
    """Return the tokens of an utterance with their log-probabilities and alternatives, if it shows them.

    They are all tokens that were sampled but the one that ends it, so also those of calls, of a stop string and of the
    space around the text. Bytes of a character that several tokens share are with the last of them.
    """

    def told(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}

    return [
        told(text, logprob) | {"top_logprobs": [told(*other) for other in others]}
        for text, logprob, others in utterance.tokens
    ]


def _choice(utterance: Utterance, request: ChatRequest, index: int) -> dict[str, Any]:
    """Return an utterance as one of the choices of a chat completion."""
    logprobs = {"content": token_logprobs(utterance), "refusal": None} if request.logprobs else None
    message, why = reply_message(utterance, request), _finish(utterance)
    return {"index": index, "message": message, "finish_reason": why, "logprobs": logprobs}


def completion(
    utterance: Utterance, request: ChatRequest, name: str, created: int, *others: Utterance
) -> dict[str, Any]:
    """Return an utterance as a chat completion. ``name`` is its id, and ``created`` the time in seconds.

    The ``others`` are further samples, which are its further choices.
    """
    choices = [_choice(one, request, index) for index, one in enumerate((utterance, *others))]
    whole = {
        "id": name, "object": "chat.completion", "created": created, "model": utterance.agent, "choices": choices,
        "usage": token_usage(utterance, *others),
    }  # fmt: skip
    return whole | ({MORE: utterance.tags[MORE]} if MORE in utterance.tags else {})


def chunks(
    utterance: Utterance, request: ChatRequest, name: str, created: int, *others: Utterance, sent: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a chat completion as the pieces of a stream, one choice after the other.

    The first ``sent`` characters of the text were sent before (:func:`said_so_far`).
    """
    whole = completion(utterance, request, name, created, *others)
    base = {**whole, "object": "chat.completion.chunk"}
    more = {MORE: base.pop(MORE)} if MORE in base else {}
    del base["usage"]
    for choice in whole["choices"]:
        message, told = choice["message"], {"logprobs": choice["logprobs"]} if choice["logprobs"] is not None else {}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
        if sent:
            deltas = [{"content": message["content"][sent:]}]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(message.get("tool_calls", ()))]
        for delta in deltas:
            yield {**base, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None, **told}]}
            told = {}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**base, "choices": [end], **more}
    if request.usage:
        yield {**base, "choices": [], "usage": whole["usage"]}


def ask_of(request: ChatRequest, messages: Sequence[Message], **more: Any) -> Ask:
    """Return what an agent is asked for ``request``, of which ``messages`` are new to it. ``more`` are those fields of
    the ask that whoever owns the address decides."""
    return Ask(
        request.agent,
        [dict(message) for message in messages],
        request.role,
        answers=False,
        fresh=True,
        schemas=request.schemas,
        refusable=True,
        single=not request.parallel,
        structured_output=request.form,
        tool_choice=request.choice,
        strict=request.strict,
        tokens=request.logprobs,
        alternatives=request.top,
        **more,
    )


def refusal_of(utterance: Utterance) -> Refused | None:
    """Return why an utterance has answered nothing, or None if it has."""
    if (why := utterance.tags.get("refused")) is None:
        return None
    too_long = utterance.tags.get("too_long", False)
    return Refused(why, code="context_length_exceeded" if too_long else "unsupported_value")


def said_so_far(said: Utterance | str, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return what was said on the way to an answer, or a part of its text, as a piece of its stream.

    ``name`` is the id of the reply.
    """
    told = {"content": said} if isinstance(said, str) else {"reasoning_content": f"{said.agent}: {said.text}\n\n"}
    choice = {"index": 0, "delta": {"role": "assistant"} | told, "finish_reason": None}
    head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": request.agent}
    return {**head, "choices": [choice]}


def with_headers(request: ChatRequest, headers: Mapping[str, str]) -> ChatRequest:
    """Return ``request`` with what its headers ``x-maporl-role`` and ``x-maporl-parents`` say."""
    parents = headers.get("x-maporl-parents")
    named = None if parents is None else tuple(part.strip() for part in parents.split(",") if part.strip())
    return replace(request, role=headers.get("x-maporl-role") or None, parents=named)
