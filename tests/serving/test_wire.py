"""Requests of chat completions as they are read, and replies as they are written."""

from dataclasses import replace

import pytest

from maporl.decoding import Sampling
from maporl.serving.wire import NEUTRAL, Refused, chunks, completion, read_chat, said, with_headers
from maporl.types import Call, Dialogue, Example, Stop, Utterance, to_record

AGENTS = ("ann", "bob")
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


NOTHING = {
    "n": [1], "stream": [False], "logprobs": [False], "top_logprobs": [0], "tools": [[]], "stop": [[]],
    "tool_choice": ["auto", "none"], "parallel_tool_calls": [True], "store": [False, True], "metadata": [{}, {"a": "b"}],
    "user": ["me"], "service_tier": ["auto"], "safety_identifier": ["a"], "prompt_cache_key": ["a"],
    "stream_options": [{"include_obfuscation": False}], "logit_bias": [{}, {"50256": 0}, {"50256": None}],
    "response_format": [{"type": "text"}, {"type": "text", "json_schema": None}], "audio": [], "prediction": [],
    "web_search_options": [{}], "max_tokens": [], "max_completion_tokens": [], "temperature": [], "top_p": [], "seed": [],
}  # fmt: skip
"""Values of other fields that change nothing, besides null."""
DEFAULTS = {
    "documented by OpenAI": (
        {
            "audio": None, "frequency_penalty": 0, "function_call": "none", "functions": [], "logit_bias": None,
            "logprobs": False, "max_completion_tokens": None, "max_tokens": None, "metadata": {}, "modalities": ["text"],
            "n": 1, "parallel_tool_calls": True, "prediction": None, "presence_penalty": 0, "reasoning_effort": "none",
            "response_format": {"type": "text"}, "seed": None, "service_tier": "auto", "stop": None, "store": False,
            "stream": False, "stream_options": None, "temperature": 1, "tool_choice": "auto", "tools": [],
            "top_logprobs": 0, "top_p": 1, "user": "", "verbosity": "medium", "web_search_options": None,
        },
        Sampling(temperature=1, top_p=1),
    ),
    "vLLM": (
        {
            "add_generation_prompt": True, "best_of": 1, "bad_words": [], "echo": False, "ignore_eos": False,
            "add_special_tokens": False, "continue_final_message": False, "include_stop_str_in_output": False,
            "spaces_between_special_tokens": True, "length_penalty": 1.0, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0, "skip_special_tokens": True,
            "stop": [], "stop_token_ids": [], "top_k": -1, "use_beam_search": False, "chat_template_kwargs": None,
        },
        Sampling(top_k=0),
    ),
    "numbers that clients write out": (
        {
            "temperature": 0.0, "top_p": 1.0, "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {},
            "max_tokens": 256, "stop": [], "stream": False, "logprobs": False, "tools": [], "user": "",
        },
        Sampling(temperature=0.0, top_p=1.0, max_tokens=256),
    ),
    "null for all that is not set": (
        dict.fromkeys((
            "best_of", "echo", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_tokens",
            "n", "parallel_tool_calls", "presence_penalty", "prompt_cache_key", "reasoning_effort", "response_format",
            "seed", "stop", "stream", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user",
        )),
        None,
    ),
}  # fmt: skip
"""Bodies of requests in which a client writes its defaults, and what these say of sampling."""


def read(**fields):
    return read_chat({"model": "ann", "messages": [USER], **fields}, AGENTS)


def test_what_a_request_says_of_sampling():
    request = read(temperature=0.5, max_completion_tokens=9, stop="END", top_p=None)
    assert request.sampling == Sampling(temperature=0.5, max_tokens=9, stop=["END"])


@pytest.mark.parametrize("name", [*NEUTRAL, *NOTHING])
def test_each_value_that_changes_nothing_is_taken(name):
    values = NEUTRAL.get(name) or NOTHING[name]
    assert [read(**{name: value}) for value in (None, *values)] == [read()] * (1 + len(values))


@pytest.mark.parametrize("client", DEFAULTS)
def test_the_defaults_of_clients_are_taken(client):
    body, sampling = DEFAULTS[client]
    assert read(**body) == replace(read(), sampling=sampling)


def test_what_counts_samples_and_random_numbers_and_alternatives():
    request = read(n=128, seed=-3, logprobs=True, top_logprobs=20)
    assert (request.n, request.seed, request.logprobs, request.top) == (128, -3, True, 20)
    assert (read(logprobs=True).top, read().n, read().seed) == (0, 1, None)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "user", "name": "bob"}, "bob"),
        ({"role": "assistant", "name": " bob "}, "bob"),
        ({"role": "system", "name": "example_user"}, "example_user"),
        ({"role": "user", "name": "user"}, None),
        ({"role": "user", "name": " "}, None),
        ({"role": "user", "name": None}, None),
        ({"role": "user", "name": "hello"}, None),
    ],
)
def test_a_name_says_who_speaks_unless_it_is_the_role_or_stands_in_the_text(message, name):
    [said] = read(messages=[{"content": "hello.", **message}]).messages
    assert said.get("name") == name
    [unsaid] = read(messages=[{**message, "content": ""}]).messages
    assert "name" not in unsaid


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert read(messages=[{"role": "developer", "content": parts}]).messages == (
        {"role": "system", "content": "hello"},
    )


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
        ({"n": 0}, "n", "expected a whole number from 1 to 128, got 0"),
        ({"n": True}, "n", "whole number"),
        ({"seed": 0.5}, "seed", "whole number"),
        ({"presence_penalty": 0.5}, "presence_penalty", "own distribution, which is the one that is trained; only 0"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "own distribution, which is the one that is trained; only {}"),
        ({"verbosity": "low"}, "verbosity", 'only "medium" is supported, got "low"'),
        ({"response_format": {"type": "json"}}, "response_format", "json_object"),
        ({"logprobs": 5}, "logprobs", "expected true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20, got 21"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs must be true too"),
        ({"audio": {}}, "audio", "not supported"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": [0.5]}, "temperature", "expected a number"),
        ({"stop": 3}, "stop", "expected texts"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"tool_choice": "required"}, "tool_choice", "'required' names none of the tools"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice", "expected"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]},
            "tool_choice",
            "'sub' names none",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format", "expected"),
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
    fields = {"n": 0, "top_p": 7, "tool_choice": "any", "audio": {}, "logprobs": 5}
    with pytest.raises(Refused) as error:
        read(**fields, temperature=0.5)
    lines = error.value.message.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(fields) and error.value.param == ", ".join(fields)
    assert all(line.endswith("; leave it out, or add it to protocol.ignore") for line in lines)
    assert read_chat({"model": "ann", "messages": [USER], **fields}, AGENTS, list(fields)).sampling is None
    with pytest.raises(Refused) as error:
        read(model="eve", n=0)
    assert (error.value.status, len(error.value.message.splitlines())) == (404, 2)


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


def test_samples_of_one_request_are_its_choices_and_its_prompt_counts_once():
    samples = [utterance("hi"), utterance("ho", Stop.LENGTH), utterance('<call>{"name": "add"}</call>')]
    samples[2].calls = [Call("5.0", "add", {})]
    reply = completion(samples[0], read(n=3), "x", 0, *samples[1:])
    found = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in reply["choices"]]
    assert found == [(0, "hi", "stop"), (1, "ho", "length"), (2, None, "tool_calls")]
    assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    pieces = list(chunks(samples[0], read(n=3, stream=True), "x", 0, *samples[1:]))
    sent = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for p in pieces for c in p["choices"]]
    assert sent == [
        (0, "hi", None), (0, None, "stop"), (1, "ho", None), (1, None, "length"), (2, None, None), (2, None, None),
        (2, None, "tool_calls"),
    ]  # fmt: skip


def test_the_numbers_of_tokens_that_only_an_api_knows_are_its_own():
    spoken = utterance("hi")
    spoken.prompt_ids, spoken.response_ids, spoken.tags["usage"] = [], [], [7, 4]
    usage = completion(spoken, read(), "x", 0)["usage"]
    assert usage == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


def test_tokens_are_told_with_their_log_probabilities_as_openai_does():
    spoken = utterance("hé")
    spoken.tokens = [("h", -0.5, [("h", -0.5), ("ü", -1.5)]), ("", -1.0, []), ("é", 0.0, [])]
    others = [{"token": "h", "logprob": -0.5, "bytes": [104]}, {"token": "ü", "logprob": -1.5, "bytes": [195, 188]}]
    content = [
        {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": others},
        {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []},
        {"token": "é", "logprob": 0.0, "bytes": [195, 169], "top_logprobs": []},
    ]
    told = {"content": content, "refusal": None}
    assert completion(spoken, read(logprobs=True, top_logprobs=2), "x", 0)["choices"][0]["logprobs"] == told
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


def test_the_last_piece_of_a_stream_has_the_numbers_of_tokens_for_who_asks_for_them():
    with_usage = list(chunks(utterance("hi"), read(stream=True, stream_options={"include_usage": True}), "x", 0))
    assert with_usage[-1]["usage"]["total_tokens"] == 3
