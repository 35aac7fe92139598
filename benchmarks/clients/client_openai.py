"""pip install openai"""

import json

from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel
from sums import AGAIN, Sum, add


class Add(BaseModel):
    a: int
    b: int


TOOL = pydantic_function_tool(Add, name="add")


async def chat(question: str, base_url: str, api_key: str) -> str:
    messages = [{"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await client.chat.completions.create(model="solver", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": AGAIN}]
        return (await client.chat.completions.create(model="solver", messages=messages)).choices[0].message.content


def tools(question: str, base_url: str, api_key: str) -> str:
    client, messages = OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": question}]
    said = client.chat.completions.create(model="solver", messages=messages, tools=[TOOL]).choices[0].message
    (call,) = said.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": result}]
    said = client.chat.completions.create(model="solver", messages=messages, tools=[TOOL])
    return said.choices[0].message.content


def stream(question: str, base_url: str, api_key: str) -> str:
    client, messages = OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": question}]
    with client.chat.completions.stream(model="solver", messages=messages, tools=[TOOL]) as events:
        said = events.get_final_completion().choices[0].message
    (call,) = said.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": result}]
    with client.chat.completions.stream(model="solver", messages=messages, tools=[TOOL]) as events:
        return "".join(event.delta for event in events if event.type == "content.delta")


def responses(question: str, base_url: str, api_key: str) -> str:
    client, items = OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": question}]
    tool = {"type": "function", **TOOL["function"]}
    said = client.responses.create(model="solver", input=items, tools=[tool])
    call = said.output[-1]
    result = str(add(**json.loads(call.arguments)))
    items += [*said.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    return client.responses.create(model="solver", input=items, tools=[tool]).output_text


def structured(question: str, base_url: str, api_key: str) -> str:
    client, messages = OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": question}]
    said = client.chat.completions.parse(model="solver", messages=messages, response_format=Sum)
    return str(said.choices[0].message.parsed.answer)
