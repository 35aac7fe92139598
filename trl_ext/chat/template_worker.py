"""The process in which chat templates are rendered, calls are read and grammars are tried: frames of JSON, as
:mod:`trl_ext.process.servant` says.

:mod:`trl_ext.chat.templates` starts it by its path, so it imports nothing of this package. It has a limit of memory,
and each request has a limit of processor time, at which the kernel ends the process. Both also hold inside of calls
that Python cannot interrupt, such as the multiplication of a text or a search for a regular expression.
"""

import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

MEMORY = 2 * 2**30
"""Bytes of address space. Before the first rendering about a tenth of it is in use."""
SECONDS = 2.0
"""Processor time of a rendering. Real templates take a thousandth of a second."""
GRAMMAR_MEMORY = 64 * 2**20
"""Bytes that compiling a grammar may take, besides those in use."""
LONGEST_EXAMPLE = 4096
FIRST = b'}]",0a'
"""The characters of an example that is short, if they are allowed."""
SPARE = 2**18
"""Most characters of a rendered text, besides eight times the characters of the request."""
PARTED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""The keys of a JSON schema that hold schemas by name."""
VALUES = ("enum", "const", "default", "examples")
"""The keys of a JSON schema that hold values, and no schemas."""


def main() -> None:
    """Answer requests until the other end is closed."""
    owner = socket.socket(fileno=os.dup(0)).makefile("rwb")
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(ImportError):  # transformers before 5.13 reads no calls
        import transformers.utils.chat_parsing  # noqa: F401  # imported before memory is limited

    _limit_memory(None)
    _write(owner, "{}")
    while len(length := owner.read(4)) == 4:
        body = owner.read(int.from_bytes(length, "big"))
        request = json.loads(body)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            if "grammar" in request:
                _limit_memory(GRAMMAR_MEMORY)  # an allocation that fails ends the process
                encoded = json.dumps(try_grammar(request["grammar"]))
                _limit_memory(None)
            elif "read" in request:
                encoded = json.dumps({"calls": read_calls(**request["read"])})
            else:
                rendered: Any = render_jinja_template(conversations=[request.pop("messages")], **request)
                text = rendered[0][0]
                most = SPARE + 8 * len(body)
                long = {"error": f"it makes {len(text)} characters of messages for which at most {most} are expected"}
                encoded = json.dumps(long if len(text) > most else {"text": text})
        except Exception as error:  # a template can raise anything
            encoded = json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error)[:2000].split())[:300]}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(owner, encoded)


def _limit_memory(more: int | None) -> None:
    """Let the process take ``more`` bytes than it has, or :data:`MEMORY` in all if it is None."""
    with contextlib.suppress(ValueError, OSError):  # a stricter limit stands already, or the system has none
        most = MEMORY
        if more is not None:
            with open("/proc/self/statm") as file:
                most = min(most, int(file.read().split()[0]) * resource.getpagesize() + more)
        resource.setrlimit(resource.RLIMIT_AS, (most, MEMORY))


def try_grammar(text: str) -> dict[str, str]:
    """Return what is wrong with the text of a ``grammar``, or a short ``example`` of what it allows.

    The fault of a JSON schema begins with its place.
    """
    import llguidance

    class Bytes:  # a tokenizer whose tokens are all bytes, behind one that ends a completion
        is_tokenizer_wrapper, eos_token_id, bos_token_id, special_token_ids = True, 256, None, [256, 257]
        tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", b"<special>"]

        def __call__(self, said: str) -> list[int]:
            return list(said.encode())

    tokenizer = llguidance.LLTokenizer(Bytes())  # type: ignore[arg-type]  # it has what one needs

    def tried(text: str) -> Any:
        # the ids of special tokens are those of another vocabulary
        matcher = llguidance.LLMatcher(tokenizer, re.sub(r"<\[[\d,-]+\]>", "<[257]>", text), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def fault(text: str) -> str:
        return tried(text).get_error().partition("\n<state>")[0].strip()

    matcher = tried(text)
    if not matcher.is_error():
        said = bytearray()
        while len(said) < LONGEST_EXAMPLE and not matcher.is_accepting() and not matcher.is_error():
            bits = matcher.compute_bitmask()
            allowed = [token for token in (*FIRST, *range(258)) if bits[token // 8] >> token % 8 & 1]
            # a text of JSON ends with a quotation mark; an object may begin a key with it, or end before
            token = ord('"') if {ord('"'), ord("q")} <= {*allowed} else allowed[0]
            matcher.consume_token(token)
            said += bytes([token]) if token < 256 else b""
        return {"example": said.decode("utf-8", "replace")}
    found = fault(text)
    try:
        [grammar] = json.loads(text)["grammars"]
        schema = grammar["json_schema"]
    except (ValueError, KeyError, TypeError):
        return {"fault": found}
    place: list[str] = []
    while True:  # the smallest part of the schema that has the fault alone
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for names, part in _parts(grammar["json_schema"]):
            inside = fault(json.dumps({"grammars": [{"json_schema": {**shared, **part}}]}))
            if inside:
                found, place, grammar = inside, [*place, *names], {"json_schema": part}
                break
        else:
            break
    return {"fault": f"{'.'.join(place) or 'the schema'}: {found}"}


def _parts(schema: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the schemas in ``schema`` with their keys."""
    for key, value in schema.items():
        if key in VALUES:
            continue
        if isinstance(value, dict) and key not in PARTED:
            yield [key], value
        elif isinstance(value, dict | list):
            named = value.items() if isinstance(value, dict) else enumerate(value)
            yield from (([key, str(name)], part) for name, part in named if isinstance(part, dict))


def _write(owner: io.BufferedRWPair, text: str) -> None:
    body = text.encode()
    owner.write(len(body).to_bytes(4, "big") + body)
    owner.flush()


def read_calls(text: str, prefix: str, template: dict[str, Any], tools: list[Any]) -> list[dict[str, Any]]:
    """Return the calls in a completion: ``{"name", "arguments"}``, or ``{"error"}`` for one that cannot be read.

    Each call is read alone, because the parser gives up a whole completion for one broken call.

    Args:
        text: the completion, special tokens included.
        prefix: the end of the prompt, which may have opened a part of the completion.
        template: a response template of transformers, which says how the model writes calls.
        tools: the schemas of the tools.
    """
    field = template["fields"]["tool_calls"]
    opening, closing = _pattern(field, "open"), _pattern(field, "close")
    said = _after_thinking(text, prefix, template)
    places = [m.start() for m in opening.finditer(said)]
    calls: list[dict[str, Any]] = []
    for start, end in zip(places, [*places, len(said)][1:], strict=True):
        first = opening.match(said, start)
        last = closing.search(said, first.end(), end) if first else None
        calls += [{"error": "it has no end"}] if last is None else _read_call(said[start : last.end()], template, tools)
    return calls


def _read_call(block: str, template: dict[str, Any], tools: list[Any]) -> list[dict[str, Any]]:
    from transformers.utils.chat_parsing.response_parser import parse_response

    try:
        calls = parse_response(block, template, prefix="", tools=tools).get("tool_calls")
    except Exception as error:  # the parsers of its parts raise their own kinds
        return [{"error": " ".join(str(error).split())[:200]}]
    if not calls:
        return [{"error": "it does not have the form of a call"}]
    return [_call(one) for one in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return {"error": "it names no tool"}
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | None):
        return {"error": f"its arguments are not an object: {str(arguments)[:80]}"}
    return {"name": function["name"], "arguments": arguments or {}}


def _after_thinking(text: str, prefix: str, template: dict[str, Any]) -> str:
    """Return what ``text`` says outside of its thinking, or "" if the thinking does not end."""
    for name, field in template["fields"].items():
        if name in ("content", "tool_calls") or ("close_pattern" not in field and "close" not in field):
            continue
        ends = [m.end() for m in _pattern(field, "close").finditer(text)]
        if ends:
            return text[ends[-1] :]
        opens = _pattern(field, "open") if "open" in field else None
        if opens is not None and (prefix.rstrip().endswith(field["open"].rstrip()) or opens.search(text)):
            return ""
    return text


def _pattern(field: dict[str, Any], side: str) -> re.Pattern[str]:
    pattern = field.get(f"{side}_pattern")
    return re.compile(re.escape(field[side]) if pattern is None else pattern)


if __name__ == "__main__":
    main()
