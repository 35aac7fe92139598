"""Requests of chat completions as they are read, and replies as they are written."""

import pytest

from maporl.decoding import Sampling
from maporl.serving.wire import Refused, chunks, completion, read_chat, said, with_headers
from maporl.types import Call, Dialogue, Example, Stop, Utterance, to_record

AGENTS = ("ann", "bob")
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def read(**fields):
    return read_chat({"model": "ann", "messages": [USER], **fields}, AGENTS)


def test_a_plain_request():
    request = read()
    assert (request.agent, request.messages, request.sampling, request.schemas) == ("ann", (USER,), None, ())


def test_what_a_request_says_of_sampling():
    request = read(temperature=0.5, max_completion_tokens=9, stop="END", top_p=None)
    assert request.sampling == Sampling(temperature=0.5, max_tokens=9, stop=["END"])


def test_fields_without_effect_are_left_out():
    assert read(user="me", seed=3, store=False, metadata={}, n=1, response_format={"type": "text"}).sampling is None


def test_values_of_vllm_that_change_nothing_are_taken():
    request = read(min_p=0.0, repetition_penalty=1.0, best_of=1, top_k=-1)
    assert request.sampling == Sampling(top_k=0)


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert read(messages=[{"role": "developer", "content": parts}]).messages == (
        {"role": "system", "content": "hello"},
    )


def test_a_call_and_its_result_have_the_name_of_the_tool():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    _, called, result = read(messages=messages, tools=[TOOL]).messages
    assert called == {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    assert result == {"role": "tool", "content": "3", "name": "add"}


def test_tools_that_may_not_be_called_are_not_shown():
    assert read(tools=[TOOL], tool_choice="none").schemas == ()
    assert read(tools=[TOOL], tool_choice="auto").schemas == (TOOL,)


def test_a_tool_is_the_same_however_a_client_writes_it():
    plain = {"type": "function", "function": {"name": "add"}}
    strict = {"type": "function", "function": {"name": "add", "description": None, "strict": True, "parameters": {}}}
    assert read(tools=[plain]).schemas == read(tools=[strict]).schemas


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"model": "eve"}, "model", "eve"),
        ({"n": 2}, "n", "only 1 is supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"logprobs": 5}, "logprobs", "expected true or false"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls", "expected true or false"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "only 0 is supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"functions": []}, "functions", "not supported"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": [0.5]}, "temperature", "expected a number"),
        ({"stop": 3}, "stop", "expected texts"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"tool_choice": "required"}, "tool_choice", "nobody can make a model call"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "'a b'"),
        ({"messages": []}, "messages", "expected a list of messages"),
        ({"messages": [{"role": "critic", "content": ""}]}, "messages.0", "'critic'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0", "expected a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0", "'image_url'"),
        ({"messages": [{"role": "tool", "tool_call_id": "c9", "content": ""}]}, "messages.0", "'c9'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_name_of_its_field(fields, param, says):
    with pytest.raises(Refused) as error:
        read(**fields)
    assert error.value.param == param and says in error.value.message
    assert error.value.body()["error"]["type"] == "invalid_request_error"


def test_all_that_cannot_be_had_is_named_at_once():
    fields = {"n": 2, "top_p": 7, "tool_choice": "required", "audio": {}, "logprobs": 5}
    with pytest.raises(Refused) as error:
        read(**fields, temperature=0.5)
    lines = error.value.message.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(fields) and error.value.param == ", ".join(fields)
    assert all(line.endswith("; leave it out, or add it to protocol.ignore") for line in lines)
    assert read_chat({"model": "ann", "messages": [USER], **fields}, AGENTS, list(fields)).sampling is None
    with pytest.raises(Refused) as error:
        read(model="eve", n=2)
    assert (error.value.status, len(error.value.message.splitlines())) == (404, 2)


def test_a_field_that_the_user_ignores_is_left_out():
    assert read_chat({"model": "ann", "messages": [USER], "n": 3, "temperature": 0}, AGENTS, ("n", "temperature"))


def test_headers_say_role_and_parents():
    request = with_headers(read(), {"x-maporl-role": "critic", "x-maporl-parents": "a, b"})
    assert (request.role, request.parents) == ("critic", ("a", "b"))
    assert with_headers(read(), {}).parents is None


def utterance(text, stop=Stop.EOS, calls=()):
    return Utterance(
        3, "ann", "ann", 0, 0, [USER], text, stop=stop, calls=list(calls), prompt_ids=[1, 2], response_ids=[3]
    )


def test_a_reply_is_a_chat_completion():
    reply = completion(utterance("hi"), read(), "chatcmpl-1-3", 12)
    assert reply["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop", "logprobs": None}
    ]
    assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert completion(utterance("hi", Stop.LENGTH), read(), "x", 0)["choices"][0]["finish_reason"] == "length"


def test_tokens_are_told_with_their_log_probabilities_as_openai_does():
    spoken = utterance("hé")
    spoken.tokens = [("h", -0.5), ("", -1.0), ("é", 0.0)]
    content = [
        {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []},
        {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []},
        {"token": "é", "logprob": 0.0, "bytes": [195, 169], "top_logprobs": []},
    ]
    told = {"content": content, "refusal": None}
    assert completion(spoken, read(logprobs=True, top_logprobs=0), "x", 0)["choices"][0]["logprobs"] == told
    first, last = chunks(spoken, read(logprobs=True, stream=True), "x", 0)
    assert first["choices"][0]["logprobs"] == told and "logprobs" not in last["choices"][0]
    assert "tokens" not in to_record(Dialogue(Example("e", "", ""), [spoken]))["utterances"][0]


def test_calls_are_told_apart_from_the_text_before_them():
    call = Call("3.0", "add", {"a": 1})
    spoken = utterance('I add.<call>{"name": "add", "arguments": {"a": 1}}</call>', Stop.STOP, [call])
    choice = completion(spoken, read(tools=[TOOL]), "x", 0)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert choice["message"]["tool_calls"] == [{"id": "call_3_0", "type": "function", "function": function}]


def test_a_stop_string_of_the_request_is_left_out_of_the_reply_as_openai_does():
    request = read(stop=["END"])
    assert said(utterance("so END", Stop.STOP), request)["content"] == "so "
    assert said(utterance("so END", Stop.EOS), request)["content"] == "so END"


def test_a_stream_has_the_reply_in_pieces():
    call = Call("3.0", "add", {})
    pieces = list(chunks(utterance('<call>{"name": "add"}</call>', calls=[call]), read(stream=True), "x", 0))
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": None} and deltas[-1] == {}
    assert deltas[1]["tool_calls"][0]["index"] == 0 and deltas[1]["tool_calls"][0]["function"]["name"] == "add"
    with_usage = list(chunks(utterance("hi"), read(stream=True, stream_options={"include_usage": True}), "x", 0))
    assert with_usage[-1]["usage"]["total_tokens"] == 3
