"""Requests of responses as they are read, and replies as they are written."""

import json

import pytest

from maporl.decoding import Sampling
from maporl.serving.responses import NEUTRAL, events, read_response, response
from maporl.serving.wire import NEUTRAL as CHAT_NEUTRAL
from maporl.serving.wire import ChatRequest, Refused
from maporl.types import Call, Stop, Utterance

AGENTS = ("ann", "bob")
TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
ADD = {"type": "function_call", "call_id": "call_3_0", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"}
MESSAGE = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
}


def read(**fields):
    return read_response({"model": "ann", "input": "hello", **fields}, AGENTS)


def test_a_text_with_instructions():
    request = read(instructions="Be short.")
    assert request == ChatRequest(
        "ann", ({"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"})
    )


def test_what_a_request_says_of_sampling():
    assert read(temperature=0.5, top_p=0.9, max_output_tokens=9).sampling == Sampling(
        temperature=0.5, top_p=0.9, max_tokens=9
    )


def test_items_become_messages_and_calls_belong_to_the_text_before_them():
    items = [
        {"role": "user", "content": "1+2?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        MESSAGE,
        ADD,
        {**ADD, "call_id": "call_3_1", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "call_3_0", "output": "3"},
        {"type": "function_call_output", "call_id": "call_3_1", "output": [{"type": "input_text", "text": "4"}]},
        {**ADD, "call_id": "call_4_0"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
    assert read(input=items).messages == (
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "content": "3", "name": "add"},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "system", "content": "Go on."},
    )


def test_a_reply_is_one_message_in_whichever_order_its_items_come():
    user, result = (
        {"role": "user", "content": "1+2?"},
        {"type": "function_call_output", "call_id": "call_3_0", "output": "3"},
    )
    swapped = read(input=[user, ADD, MESSAGE, result, MESSAGE]).messages
    assert swapped[:3] == read(input=[user, MESSAGE, ADD, result]).messages
    assert swapped[3:] == ({"role": "assistant", "content": "I add."},)
    assert [one["content"] for one in read(input=[MESSAGE, MESSAGE]).messages] == ["I add.", "I add."]


def test_tools_are_those_of_chat_completions():
    assert read(tools=[TOOL]).schemas == (SCHEMA,)
    assert read(tools=[TOOL], tool_choice="none").schemas == ()
    assert read(tools=[]).schemas == () and not read(tools=[TOOL], parallel_tool_calls=False).parallel


TEXT = {"type": "text"}
NOTHING = {
    **{name: list(values) for name, values in (CHAT_NEUTRAL | NEUTRAL).items() if name != "response_format"},
    "include": [[], ["reasoning.encrypted_content"]],
    "reasoning": [{}, {"effort": None, "summary": None}, {"effort": "none"}],
    "text": [{}, {"format": TEXT, "verbosity": None}, {"format": TEXT, "verbosity": "medium"}, {"verbosity": "medium"}],
    "store": [False, True], "stream": [False], "parallel_tool_calls": [True], "tools": [[]], "tool_choice": ["auto", "none"],
    "top_logprobs": [0], "max_tool_calls": [3], "client_metadata": [{"x-codex-turn-metadata": "{}"}], "metadata": [{}], "service_tier": ["auto"], "user": ["me"],
    "previous_response_id": [], "conversation": [], "prompt": [], "instructions": [], "temperature": [], "top_p": [],
}  # fmt: skip
"""Values that change nothing, besides null."""


@pytest.mark.parametrize("name", NOTHING)
def test_each_value_that_changes_nothing_is_taken(name):
    assert [read(**{name: value}) for value in (None, *NOTHING[name])] == [read()] * (1 + len(NOTHING[name]))


@pytest.mark.parametrize(
    ("fields", "logprobs", "top"),
    [
        ({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, True, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, True, 3),
        ({"top_logprobs": 3}, True, 3),
        ({"top_logprobs": 0}, False, 0),
    ],
)
def test_log_probabilities_are_asked_for_by_include_or_by_a_number_of_alternatives(fields, logprobs, top):
    assert (read(**fields).logprobs, read(**fields).top) == (logprobs, top)


def test_log_probabilities_stand_beside_the_text_and_in_the_stream():
    spoken = utterance("hi")
    spoken.tokens = [("hi", -0.5, [("hi", -0.5), ("ho", -1.5)])]
    others = [
        {"token": "hi", "logprob": -0.5, "bytes": [104, 105]},
        {"token": "ho", "logprob": -1.5, "bytes": [104, 111]},
    ]
    told = [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": others}]
    request = read(top_logprobs=2, stream=True)
    assert response(spoken, request, "resp_1-3", 12)["output"][0]["content"][0]["logprobs"] == told
    sent = {event["type"].removeprefix("response."): event for event in events(spoken, request, "resp_1-3", 12)}
    assert sent["output_text.delta"]["logprobs"] == sent["output_text.done"]["logprobs"] == told
    assert sent["content_part.added"]["part"]["logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1-0"}, "previous_response_id", "send the whole conversation as input"),
        ({"background": True}, "background", "true is not supported"),
        ({"include": ["file_search_call.results"]}, "include", "protocol.ignore"),
        ({"include": "all"}, "include", '"all" is not'),
        ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"text": {"verbosity": "low"}}, "text", "low"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "high"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text", "json_schema"),
        ({"max_tokens": 3}, "max_tokens", "not supported"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "'add' names none of the tools"),
        ({"tools": {}}, "tools", "expected a list"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [SCHEMA]}, "tools", "expected"),
        ({"instructions": 3}, "instructions", "expected a text"),
        ({"input": []}, "input", "expected a text or a list of items"),
        ({"input": [3]}, "input.0", "got 3"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "item_reference"),
        ({"input": [{"role": "tool", "content": ""}]}, "input.0", "'tool'"),
        ({"input": [{"role": "user", "content": None}]}, "input.0", "expected a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0", "'input_image'"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input.0", "call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": ""}]}, "input.0", "'c9'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_name_of_its_field(fields, param, says):
    with pytest.raises(Refused) as error:
        read(**fields)
    assert error.value.param == param and says in error.value.message


def test_a_field_that_the_user_ignores_is_left_out():
    assert read_response({"model": "ann", "input": "hello", "reasoning": {"effort": "low"}}, AGENTS, ("reasoning",))


def utterance(text, stop=Stop.EOS, calls=()):
    return Utterance(3, "ann", "ann", 0, 0, [], text, stop=stop, calls=list(calls), prompt_ids=[1, 2], response_ids=[3])


CALLING = utterance(
    'I add.<call>{"name": "add", "arguments": {"a": 1}}</call>', Stop.STOP, [Call("3.0", "add", {"a": 1})]
)


def test_a_reply_is_a_response():
    reply = response(utterance("hi"), read(tools=[TOOL]), "resp_1-3", 12)
    part = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    message = {"id": "msg_resp_1-3", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert reply["output"] == [message]
    assert (reply["id"], reply["model"], reply["status"], reply["created_at"]) == ("resp_1-3", "ann", "completed", 12)
    assert reply["usage"]["total_tokens"] == 3 and reply["usage"]["input_tokens"] == 2
    assert reply["tools"] == [{**TOOL, "strict": None}]


def test_a_reply_that_was_cut_is_incomplete():
    reply = response(utterance("hi", Stop.LENGTH), read(), "resp_1-3", 12)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_calls_are_items_after_the_text():
    text, call = response(CALLING, read(tools=[TOOL]), "resp_1-3", 12)["output"]
    assert text["content"][0]["text"] == "I add."
    assert call == {**ADD, "id": "fc_call_3_0", "status": "completed"}
    only = utterance('<call>{"name": "add"}</call>', calls=[Call("3.0", "add", {})])
    assert [item["type"] for item in response(only, read(tools=[TOOL]), "resp_1-3", 12)["output"]] == ["function_call"]


def test_a_stream_has_numbered_events_and_ends_with_the_whole_response():
    request = read(tools=[TOOL], stream=True)
    sent = list(events(CALLING, request, "resp_1-3", 12))
    assert [event["type"].removeprefix("response.") for event in sent] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in sent] == list(range(13))
    assert sent[4]["delta"] == "I add." and json.loads(sent[9]["delta"]) == {"a": 1}
    assert sent[-1]["response"] == response(CALLING, request, "resp_1-3", 12)
    assert sent[0]["response"]["output"] == [] and sent[2]["item"]["content"] == []
