"""Clients that ask for structured outputs and for calls, with untrained models that answer and learn."""

import json
from string import printable

import pytest
from tiny_runs import config_of

from maporl.runs import train as run
from maporl.serving.wire import form_of, read_chat

SCHEMA = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 18}, "sure": {"type": "boolean"}},
    "required": ["digit", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": ADD}
STRICT = {"type": "function", "function": ADD | {"strict": True}}
SEEN = []
"""What the programs of a test were told."""


def checked(answer):
    assert set(answer) == {"digit", "sure"} and 0 <= answer["digit"] <= 18 and isinstance(answer["sure"], bool)
    SEEN.append(answer)
    return str(answer["digit"])


def with_openai(question, base_url, api_key):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    first = client.chat.completions.create(model="ann", messages=messages, response_format=FORMAT)
    checked(json.loads(first.choices[0].message.content))
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, messages[0]]
    pieces = client.chat.completions.create(model="ann", messages=messages, response_format=FORMAT, stream=True)
    checked(json.loads("".join(piece.choices[0].delta.content or "" for piece in pieces)))
    many = client.chat.completions.create(model="bob", messages=messages, response_format=FORMAT, n=2)
    first, _ = [checked(json.loads(choice.message.content)) for choice in many.choices]
    return first


def with_responses(question, base_url, api_key):
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Answer(BaseModel):
        digit: int = Field(ge=0, le=18)
        sure: bool

    client = OpenAI(base_url=base_url, api_key=api_key)
    for agent in ("ann", "bob"):
        parsed = client.responses.parse(model=agent, input=question, text_format=Answer)
        digit = checked(parsed.output_parsed.model_dump())
    return digit


def with_anthropic(question, base_url, api_key):
    from anthropic import Anthropic

    client = Anthropic(base_url=base_url, api_key=api_key)
    for agent in ("ann", "bob"):
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        said = client.messages.create(
            model=agent, max_tokens=60, messages=[{"role": "user", "content": question}], output_config=form
        )
        digit = checked(json.loads(said.content[0].text))
        tools = [{"name": ADD["name"], "description": "Add.", "input_schema": ADD["parameters"], "strict": True}]
        said = client.messages.create(
            model=agent, max_tokens=90, messages=[{"role": "user", "content": question}], tools=tools,
            tool_choice={"type": "any"},
        )  # fmt: skip
        (used,) = [block for block in said.content if block.type == "tool_use"]
        assert said.stop_reason == "tool_use" and 0 <= used.input["a"] <= 9 and used.input["b"] in (1, 2)
    return digit


def with_langchain(question, base_url, api_key):
    from langchain_openai import ChatOpenAI

    for agent in ("ann", "bob"):
        model = ChatOpenAI(model=agent, base_url=base_url, api_key=api_key, temperature=None)
        for method in ("json_schema", "function_calling"):
            schema = SCHEMA | {"title": "answer", "description": "An answer."}
            digit = checked(model.with_structured_output(schema, method=method, strict=True).invoke(question))
    return digit


def with_calls(question, base_url, api_key):
    """Calls that are required, named, and free with a strict tool."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    for agent in ("ann", "bob"):
        for choice in ("required", {"type": "function", "function": {"name": "add"}}, "auto"):
            longest = 30 if choice == "auto" else 120
            said = client.chat.completions.create(
                model=agent, messages=messages, tools=[STRICT], tool_choice=choice, max_tokens=longest
            )
            for call in said.choices[0].message.tool_calls or ():
                arguments = json.loads(call.function.arguments)
                assert call.function.name == "add" and 0 <= arguments["a"] <= 9 and arguments["b"] in (1, 2)
                SEEN.append(call)
            if choice != "auto":
                assert len(said.choices[0].message.tool_calls) == 1 and said.choices[0].finish_reason == "tool_calls"
        loose = client.chat.completions.create(model=agent, messages=messages, tools=[TOOL], tool_choice="required")
        assert json.loads(loose.choices[0].message.tool_calls[0].function.arguments).keys() == {"a", "b"}
    return "4"


@pytest.mark.parametrize(
    "client",
    [with_openai, with_responses, with_anthropic, pytest.param(with_langchain, marks=pytest.mark.slow), with_calls],
)
def test_every_answer_of_an_untrained_model_can_be_read_and_is_learned_from(tmp_path, client):
    SEEN.clear()
    sections = {
        "agent_defaults": {"tiny": {"alphabet": printable[:95] + "\n", "hidden_size": 32, "layers": 1, "context": 1200}},
        "protocol": {"name": "program", "run": f"test_structured_clients:{client.__name__}", "on_failure": "stop"},
        "ppo": {"response_length": 120, "temperature": 1.0, "num_ppo_epochs": 2},
        "reward": {"sources": {"label": 1.0}, "rules": ["last"]}, "warm_start": {"steps": 0},
    }  # fmt: skip
    config = config_of(tmp_path / "run", 2, sections, learning_rate=0.0, per_device_train_batch_size=4)
    run.train(config, resume=False)
    assert len(SEEN) >= 16
    updates = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for agent in ("ann", "bob"):
        ratios = [update[f"{agent}/val/first_ratio"] for update in updates if f"{agent}/val/first_ratio" in update]
        assert ratios == pytest.approx([1.0, 1.0], abs=1e-5)
        assert all(update["program/refused"] == 0.0 for update in updates if "program/refused" in update)
    dialogues = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    held = [u for d in dialogues for u in d["utterances"] if u["grammar"] and "begun[lazy]" not in u["grammar"]["text"]]
    assert held and all(u["stop"] == "eos" or u["calls"] for u in held)


BODY = {"model": "ann", "messages": [{"role": "user", "content": "hello"}]}


def test_a_json_object_is_any_object_and_text_is_anything():
    assert form_of({"type": "json_object"}).schema == {"type": "object"} and form_of({"type": "text"}) is None
    request = read_chat(
        BODY | {"tools": [STRICT, TOOL | {"function": ADD | {"name": "sub"}}], "tool_choice": "required"}, ("ann",)
    )
    assert (request.choice, request.strict, len(request.schemas)) == ("required", ("add",), 2)


def hostile(question, base_url, api_key):
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    for schema in (
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"type": "integer", "minimum": 2, "maximum": 1},
    ):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(BadRequestError) as told:
            client.chat.completions.create(model="ann", messages=BODY["messages"], response_format=form)
        SEEN.append(str(told.value))
    client.chat.completions.create(model="bob", messages=BODY["messages"], max_tokens=4)
    return "4"


def test_a_schema_that_cannot_be_followed_ends_the_request_and_not_the_run(tmp_path):
    SEEN.clear()
    sections = {
        "protocol": {"name": "program", "run": "test_structured_clients:hostile"},
        "reward": {"rules": ["last"]},
        "warm_start": {"steps": 0},
    }
    run.train(config_of(tmp_path / "run", 1, sections, learning_rate=0.0, on_void="warn"), resume=False)
    told = " ".join(SEEN)
    assert "response_format: properties.a: Unimplemented keys" in told and "response_format: the schema: " in told
    assert "minimum (2) is greater than maximum (1); leave it out, or add it to protocol.ignore" in told
