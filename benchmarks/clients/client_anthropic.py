"""pip install anthropic"""

from anthropic import Anthropic, beta_tool
from sums import AGAIN, Sum, add


def client(base_url: str, api_key: str) -> Anthropic:
    """Its address is the one before the version, which it adds."""
    return Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)


def chat(question: str, base_url: str, api_key: str) -> str:
    ask = client(base_url, api_key).messages.create
    messages = [{"role": "user", "content": question}]
    said = ask(model="solver", max_tokens=100, messages=messages)
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": AGAIN}]
    return ask(model="solver", max_tokens=100, messages=messages).content[0].text


def tools(question: str, base_url: str, api_key: str, streamed: bool = False) -> str:
    messages = [{"role": "user", "content": question}]
    options = {"model": "solver", "max_tokens": 100, "tools": [beta_tool(add).to_dict()]}
    while True:
        if streamed:
            with client(base_url, api_key).messages.stream(messages=messages, **options) as events:
                text = "".join(events.text_stream)
                said = events.get_final_message()
        else:
            said = client(base_url, api_key).messages.create(messages=messages, **options)
            text = "".join(block.text for block in said.content if block.type == "text")
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return text
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": str(add(**one.input))} for one in calls]
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]


def stream(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, streamed=True)


def structured(question: str, base_url: str, api_key: str) -> str:
    messages = [{"role": "user", "content": question}]
    said = client(base_url, api_key).messages.parse(
        model="solver", max_tokens=100, messages=messages, output_format=Sum
    )
    return str(said.parsed_output.answer)
