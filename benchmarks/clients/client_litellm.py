"""pip install litellm"""

import json

import litellm
from sums import AGAIN, Sum, add

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def ask(messages: list, base_url: str, api_key: str, **options):
    return litellm.completion("openai/solver", messages, base_url=base_url, api_key=api_key, **options)


def chat(question: str, base_url: str, api_key: str) -> str:
    messages = [{"role": "user", "content": question}]
    messages += [ask(messages, base_url, api_key).choices[0].message, {"role": "user", "content": AGAIN}]
    return ask(messages, base_url, api_key).choices[0].message.content


def tools(question: str, base_url: str, api_key: str, streamed: bool = False) -> str:
    messages = [{"role": "user", "content": question}]
    said = ask(messages, base_url, api_key, tools=[TOOL], stream=streamed)
    said = litellm.stream_chunk_builder(list(said)) if streamed else said
    (call,) = said.choices[0].message.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    said = ask(messages, base_url, api_key, tools=[TOOL], stream=streamed)
    return (litellm.stream_chunk_builder(list(said)) if streamed else said).choices[0].message.content


def stream(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, streamed=True)


def responses(question: str, base_url: str, api_key: str) -> str:
    options = {"base_url": base_url, "api_key": api_key, "tools": [{"type": "function", **TOOL["function"]}]}
    items = [{"role": "user", "content": question}]
    said = litellm.responses(model="openai/solver", input=items, **options)
    call = said.output[-1]
    result = str(add(**json.loads(call.arguments)))
    items += [*said.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    return litellm.responses(model="openai/solver", input=items, **options).output[0].content[0].text


def structured(question: str, base_url: str, api_key: str) -> str:
    said = ask([{"role": "user", "content": question}], base_url, api_key, response_format=Sum)
    return str(Sum.model_validate_json(said.choices[0].message.content).answer)
