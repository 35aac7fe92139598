"""Anthropic's messages: requests as they are read, replies as they are written, and the real client of the ``anthropic``
package against the real server."""

import asyncio
import json
import re
import sys

import pytest
from asked_programs import Script, post, user
from asked_programs import play as play_script
from folders import ROOT
from test_clients import TOOL as ADD
from test_clients import call, play

from maporl.decoding import Sampling
from maporl.guard import Limits
from maporl.runs.train import train
from maporl.serving.anthropic import error, message, read_message
from maporl.serving.wire import ChatRequest, Refused, read_chat
from maporl.types import Call, Stop, Utterance
from maporl.validation.load import load

anthropic = pytest.importorskip("anthropic")
AGENTS = ("ann", "bob")
TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["parameters"]}
OPENAIS = {"type": "function", "function": ADD}
USE = {"type": "tool_use", "id": "call_3_0", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_3_0", "content": "2"}


def text(words, **fields):
    return {"type": "text", "text": words, **fields}


def read(ignored=(), **fields):
    return read_message({"model": "ann", "max_tokens": 9, "messages": [user("hello")], **fields}, AGENTS, ignored)


def said(content):
    return {"role": "assistant", "content": content}


# -- requests -------------------------------------------------------------------------------------------------------------


def test_a_text_with_a_system_prompt():
    request = read(system="Be short.")
    assert request == ChatRequest(
        "ann", ({"role": "system", "content": "Be short."}, user("hello")), sampling=Sampling(max_tokens=9)
    )


def test_what_a_request_says_of_sampling():
    request = read(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], stream=True)
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, stop=["END"])
    assert request.stream


def test_fields_without_effect_are_left_out():
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [text("hel", **cached, citations=None), text("lo")]
    neutral = {"thinking": {"type": "disabled"}, "output_config": {}, "service_tier": "auto", "container": None}
    request = read(messages=[{"role": "user", "content": blocks}], metadata={"user_id": "me"}, **cached, **neutral)
    assert request == read()
    assert read(tools=[{**TOOL, **cached, "type": "custom"}]) == read(tools=[TOOL])
    assert read(tools=[{**TOOL, "strict": True}]).strict == ("add",)


def called(arguments, name="call_3_0"):
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


def calls(words, *written):
    return {"role": "assistant", "content": words, "tool_calls": list(written)}


def result(content, name="call_3_0"):
    return {"role": "tool", "tool_call_id": name, "content": content}


OTHER_USE = {**USE, "id": "x", "input": {"a": "é"}}
OTHER_CALL = called('{"a": "é"}', "x")
OTHER_RESULT = {**RESULT, "tool_use_id": "x", "is_error": True}
EMPTY_RESULT = {"type": "tool_result", "tool_use_id": "call_3_0"}


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"system": "S"}, {"messages": [{"role": "system", "content": "S"}, user("hello")]}),
        (
            {"system": [text("S1"), text("S2")]},
            {"messages": [{"role": "system", "content": [text("S1"), text("S2")]}, user("hello")]},
        ),
        ({"system": ""}, {"messages": [user("hello")]}),
        *[
            ({"messages": conversation}, {"messages": conversation})
            for conversation in (
                [user("a"), said(" b "), user("c")],
                [user("a"), said([text("b"), text("b")]), user([text("c"), text("d")])],
                [user("a"), user("b")],
                [user([])],
                [user("a"), said([]), user("b")],
                [user("a"), {"role": "system", "content": "b"}],
            )
        ],
        (
            {"messages": [user("1+1?"), said([text("So:"), USE]), user([RESULT])], "tools": [TOOL]},
            {"messages": [user("1+1?"), calls("So:", called('{"a": 1}')), result("2")], "tools": [OPENAIS]},
        ),
        (
            {"messages": [user("1+1?"), said([USE]), user([{**RESULT, "content": [text("2")]}, text("Is"), text("it?")])]},
            {"messages": [user("1+1?"), calls(None, called('{"a":1}')), result([text("2")]), user("Isit?")]},
        ),
        (
            {"messages": [user("?"), said([USE, OTHER_USE]), user([OTHER_RESULT, EMPTY_RESULT])]},
            {"messages": [user("?"), calls("", called('{"a": 1}'), OTHER_CALL), result("2", "x"), result("")]},
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [OPENAIS]}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [OPENAIS], "tool_choice": "none"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tools": [OPENAIS], "parallel_tool_calls": False},
        ),
        ({"tools": []}, {}),
    ],
)  # fmt: skip
def test_a_conversation_in_this_form_and_in_openais_reach_the_agent_as_equal_messages(fields, same):
    body = {"model": "ann", "max_tokens": 9, "messages": [user("hello")], **same}
    assert read(**fields) == read_chat(body, AGENTS)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", "1024"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1-0"}}, "thread", "send the whole conversation"),
        ({"stop": ["END"]}, "stop", "not supported"),
        ({"stop_sequences": "END"}, "stop_sequences", "END"),
        ({"stop_sequences": [""]}, "stop_sequences", "not empty"),
        ({"tool_choice": "auto"}, "tool_choice", 'expected {"type": "auto"}'),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "'required' names none of the tools"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", "add"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", "json_schema"),
        ({"tool_choice": {"type": "required"}}, "tool_choice", '{"type": "required"}'),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice", "disable_parallel_tool_use"),
        ({"tools": {}}, "tools", "expected a list"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "web_search_20250305"),
        ({"tools": [OPENAIS]}, "tools", "input_schema"),
        ({"tools": [{**TOOL, "input_examples": [{"a": 1}]}]}, "tools", "tools.0.input_examples"),
        ({"system": 3}, "system", "expected a text"),
        ({"messages": []}, "messages", "expected a list of messages"),
        ({"messages": [3]}, "messages.0", "got 3"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0", "'tool'"),
        ({"messages": [user(None)]}, "messages.0", "expected a text or blocks"),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "messages.0", "messages.0.content.0.type"),
        ({"messages": [user([text("a"), {"type": "document"}])]}, "messages.0", "'document'"),
        ({"messages": [user([text(None)])]}, "messages.0", "messages.0.content.0.text"),
        ({"messages": [user([USE])]}, "messages.0", "'tool_use'"),
        ({"messages": [user("a"), said([{"type": "thinking", "thinking": "Hm."}])]}, "messages.1", "'thinking'"),
        ({"messages": [user("a"), said([RESULT])]}, "messages.1", "'tool_result'"),
        ({"messages": [user("a"), said([{"type": "tool_use", "name": "add", "input": {}}])]}, "messages.1", "id, name"),
        ({"messages": [user([RESULT])]}, "messages.0", "'call_3_0'"),
        ({"messages": [user("a"), said([USE]), user([{**RESULT, "content": [{"type": "image"}]}])]}, "messages.2", "'image'"),
        ({"messages": [user("a"), said("The answer is")]}, "messages.1", "given words"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_the_name_of_its_field(fields, param, says):
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert refused.value.param == param and says in refused.value.message


def test_all_that_cannot_be_had_is_named_at_once():
    fields = {
        "thinking": {"type": "enabled"},
        "stop_sequences": 3,
        "container": "c",
        "tool_choice": {"type": "other"},
        "top_p": 7,
    }
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert [line.partition(":")[0] for line in refused.value.message.splitlines()] == list(fields)
    assert read(list(fields), **fields) == read()


def test_a_field_that_the_user_ignores_is_left_out_under_either_name():
    """But not one without which the messages may be a part of the conversation."""
    single = {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert not read(**single).parallel
    assert read(["parallel_tool_calls"], **single).parallel and read(["tool_choice"], **single).parallel
    assert read(["stop"], stop_sequences=["END"]) == read(["stop_sequences"], stop_sequences=["END"]) == read()
    with pytest.raises(Refused, match="thread: nothing is stored"):
        read(["thread"], thread={"type": "create"})


# -- replies --------------------------------------------------------------------------------------------------------------


def utterance(words, stop=Stop.EOS, calls=()):
    return Utterance(
        3, "ann", "ann", 0, 0, [], words, stop=stop, calls=list(calls), prompt_ids=[1, 2], response_ids=[3]
    )


CALLING = utterance(
    'I add.<call>{"name": "add", "arguments": {"a": 1}}</call>', Stop.STOP, [Call("3.0", "add", {"a": 1})]
)


def test_a_reply_is_a_message():
    assert message(utterance("hi"), read(), "msg_1-3", 12) == {
        "id": "msg_1-3",
        "type": "message",
        "role": "assistant",
        "model": "ann",
        "content": [text("hi")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2, "output_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip
    assert message(utterance(""), read(), "", 0)["content"] == [text("")], "programs read content[0].text"
    stopped = message(utterance("so END", Stop.STOP), read(stop_sequences=["END"]), "", 0)
    assert stopped["content"] == [text("so ")]


@pytest.mark.parametrize(
    ("spoken", "fields", "reason", "sequence"),
    [
        (utterance("hi", Stop.LENGTH), {}, "max_tokens", None),
        (utterance("hi", Stop.FILTERED), {}, "refusal", None),
        (utterance("so END", Stop.STOP), {"stop_sequences": ["\n\n", "END"]}, "stop_sequence", "END"),
        (utterance("so END.", Stop.STOP), {"stop_sequences": ["END"]}, "stop_sequence", "END"),
        (utterance("so", Stop.STOP), {"stop_sequences": ["END", "\n\n"]}, "stop_sequence", "\n\n"),
        (utterance("so END", Stop.EOS), {"stop_sequences": ["END"]}, "end_turn", None),
        (utterance("so END", Stop.STOP), {}, "end_turn", None),  # a stop string of the run
        (CALLING, {"tools": [TOOL], "stop_sequences": ["</call>"]}, "tool_use", None),
    ],
)
def test_a_reply_says_why_it_ended(spoken, fields, reason, sequence):
    reply = message(spoken, read(**fields), "", 0)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_an_error_has_the_word_that_fits_its_status(status, kind):
    body = error(Refused("no", status=status, code="why"))
    assert body == {"type": "error", "error": {"type": kind, "message": "no", "details": {"error_code": "why"}}}


# -- the client -----------------------------------------------------------------------------------------------------------


def client_of(base_url, kind=anthropic.Anthropic):
    return kind(base_url=base_url, api_key="any")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_repeats_a_conversation_with_calls_goes_on_token_by_token(stream):
    def program(question, base_url):
        client, messages = client_of(base_url), [user(question)]

        def ask(agent="ann", **fields):
            fields = {"model": agent, "max_tokens": 64, "messages": messages, **fields}
            if not stream:
                return client.messages.create(**fields)
            with client.messages.stream(**fields) as events:
                pieces = "".join(events.text_stream)
                reply = events.get_final_message()
            assert pieces == "".join(block.text for block in reply.content if block.type == "text")
            return reply

        for dump in (lambda block: block, lambda block: block.model_dump(), lambda block: block.to_dict()):
            reply = ask(tools=[TOOL], system="Add.")
            asked = reply.content[-1]
            assert (reply.stop_reason, asked.name, asked.input) == ("tool_use", "add", {"a": 1})
            messages.append(said([dump(block) for block in reply.content]))
            messages.append(user([{"type": "tool_result", "tool_use_id": asked.id, "content": [text("2")]}]))
        last = ask(tools=[TOOL], system="Add.")
        assert (last.stop_reason, last.model, last.role) == ("end_turn", "ann", "assistant")
        assert last.usage.input_tokens > last.usage.output_tokens == len("2") + 1  # each character is a token
        messages[:] = [user("Say it.")]
        return ask("bob", extra_headers={"x-maporl-parents": last.id}).content[0].text

    script = ["I add." + call("add", a=1), call("add", a=1), call("add", a=1), "2"]
    dialogue, _ = play(program, {"ann": script, "bob": ["two"]})
    assert "failure" not in dialogue.outcome, dialogue.outcome["failure"]
    told = [(u.agent, u.after, u.tags.get("history"), u.parents) for u in dialogue.utterances]
    assert told == [
        ("ann", None, None, ()),
        ("ann", 0, "continued", (0,)),
        ("ann", 1, "continued", (0, 1)),
        ("ann", 2, "continued", (0, 1, 2)),
        ("bob", None, None, (3,)),
    ]
    assert [u.calls[0].result.text for u in dialogue.utterances[:3]] == ["2", "2", "2"]
    assert dialogue.outcome == {"answer": "two", "calls": 5, "requests": 5, "answered": 5}


@pytest.mark.parametrize("told", [{}, {"thread": False}], ids=["threads", "whole"])
def test_the_tool_runner_of_the_client_sends_whole_conversations(told):
    """At first it asks the server to keep the conversation."""

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Add."""
        return str(a + 1)

    def program(question, base_url):
        fields = {"model": "ann", "max_tokens": 64, "messages": [user(question)], "tools": [add], **told}
        return client_of(base_url).beta.messages.tool_runner(**fields).until_done().content[0].text

    dialogue, _ = play(program, {"ann": [call("add", a=1), call("add", a="x"), "2"]})
    assert [u.tags.get("history") for u in dialogue.utterances] == [None, "continued", "continued"]
    first, second = (u.calls[0].result.text for u in dialogue.utterances[:2])
    assert first == "2" and second.startswith("ValueError"), "the client's words for a tool that failed"
    assert dialogue.outcome["requests"] - dialogue.outcome["answered"] == (0 if told else 1)
    assert all(why.startswith("thread: nothing is stored") for why in dialogue.outcome.get("refused", ()))


def test_what_is_refused_is_an_exception_of_the_client(monkeypatch):
    monkeypatch.setattr("maporl.serving.gateway.LIMITS", Limits(body=10_000))
    monkeypatch.setattr("maporl.serving.gateway._GATEWAYS", {})  # another server, which has these limits
    addresses = []

    def program(question, base_url):
        addresses.append(base_url)
        client, asked = client_of(base_url), {"model": "ann", "max_tokens": 8, "messages": [user(question)]}

        def refused(kind, ask=client.messages.create, **fields):
            with pytest.raises(kind) as told:
                ask(**{**asked, **fields})
            return told.value.type, told.value.error_code, told.value.api_message

        why = refused(anthropic.BadRequestError, thinking={"type": "enabled", "budget_tokens": 1024})
        assert why[:2] == ("invalid_request_error", "unsupported_value") and why[2].startswith("thinking: ")
        assert refused(anthropic.NotFoundError, model="eve")[:2] == ("not_found_error", "model_not_found")
        counted = refused(anthropic.NotFoundError, lambda max_tokens, **rest: client.messages.count_tokens(**rest))
        assert counted[0] == "not_found_error" and counted[2].startswith("count_tokens: ")
        assert refused(anthropic.NotFoundError, lambda **_: client.messages.batches.list())[0] == "not_found_error"
        large = refused(anthropic.ContentTooLargeError, messages=[user("a" * 20_000)])
        assert large[:2] == ("request_too_large", "too_large")
        client.messages.create(**asked)
        assert refused(anthropic.RateLimitError)[:2] == ("rate_limit_error", "too_many_calls")
        return "5"

    dialogue, _ = play(program, {"ann": ["5"]}, calls=1)
    assert "failure" not in dialogue.outcome, dialogue.outcome["failure"]
    assert len(dialogue.outcome["refused"]) == 6, "no request was sent again"
    with pytest.raises(anthropic.APIStatusError) as over:
        client_of(addresses[0]).messages.create(model="ann", max_tokens=8, messages=[user("?")])
    assert (over.value.status_code, over.value.error_code) == (410, "dialogue_over")
    status, body = post(addresses[0], "chat/completions", {})
    assert status == 410 and body["error"]["code"] == "dialogue_over" and "type" not in body


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/v1/messages", "/v1/messages?beta=true"])
def test_an_address_with_or_without_v1_works(path):
    def program(question, base_url):
        asked = {"model": "ann", "max_tokens": 8, "messages": [user(question)]}
        status, reply = post(base_url.removesuffix("/v1"), path.lstrip("/"), asked)
        assert status == 200 and re.fullmatch(r"msg_\d+-0", reply["id"])
        return reply["content"][0]["text"]

    [dialogue] = play_script(program, Script(ann=["4"]))
    assert dialogue.outcome["answer"] == "4"


COMMAND = """
import json, sys
from anthropic import Anthropic

reply = Anthropic().messages.create(
    model="ann", max_tokens=8, messages=[{"role": "user", "content": json.load(sys.stdin)["question"]}]
)
print(reply.content[0].text)
"""


def test_a_command_that_makes_its_client_without_arguments_finds_its_agents(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a real one")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://api.example.com")
    (tmp_path / "program.py").write_text(COMMAND)
    [dialogue] = play_script(None, Script(ann=["4"]), command=(sys.executable, str(tmp_path / "program.py")))
    assert dialogue.outcome == {"answer": "4", "calls": 1, "requests": 1, "answered": 1}


def test_an_asynchronous_client_asks_agents_at_the_same_time():
    async def program(question, base_url):
        async with client_of(base_url, anthropic.AsyncAnthropic) as client:

            async def ask(agent):
                fields = {"model": agent, "max_tokens": 8, "messages": [user(question)]}
                whole = await client.messages.create(**fields)
                async with client.messages.stream(**fields) as stream:
                    return whole.content[0].text + await stream.get_final_text()

            return " ".join(await asyncio.gather(ask("ann"), ask("bob")))

    dialogue, _ = play(program, {"ann": ["1", "2"], "bob": ["3", "4"]})
    assert dialogue.outcome == {"answer": "12 34", "calls": 4, "requests": 4, "answered": 4}


def test_the_same_conversation_by_both_clients_is_one():
    """An agent that was asked in Anthropic's form goes on when it is asked in OpenAI's."""
    openai = pytest.importorskip("openai")

    def program(question, base_url):
        first = client_of(base_url).messages.create(
            model="ann", max_tokens=64, messages=[user(question)], system="Add.", tools=[TOOL]
        )
        [asked] = first.content
        calls = [
            {"id": asked.id, "type": "function", "function": {"name": "add", "arguments": json.dumps(asked.input)}}
        ]
        messages = [
            {"role": "system", "content": "Add."},
            user(question),
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": asked.id, "content": "2"},
        ]
        client = openai.OpenAI(base_url=base_url, api_key="any")
        return (
            client.chat.completions.create(model="ann", messages=messages, tools=[OPENAIS]).choices[0].message.content
        )

    dialogue, _ = play(program, {"ann": [call("add", a=1), "2"]})
    assert [(u.after, u.tags.get("history")) for u in dialogue.utterances] == [(None, None), (0, "continued")]


def test_a_program_of_this_client_trains_both_agents(tmp_path):
    changes = ["updates=2", "branching.group=2", f"output_dir={tmp_path / 'run'}", "protocol.run=with_anthropic:solve"]
    train(load(ROOT / "examples/programs/team.yaml", changes), resume=False, quiet=True)
    updates = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(updates) == 2
    for update in updates:
        assert update["solver/continued_share"] == 1.0 and update["program/failed"] == 0.0
        assert update["solver/val/first_ratio"] == update["checker/val/first_ratio"] == pytest.approx(1.0, abs=1e-5)
