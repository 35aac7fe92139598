"""pip install haystack-ai"""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from sums import AGAIN, Sum, add


def chat(question: str, base_url: str, api_key: str) -> str:
    model = OpenAIChatGenerator(Secret.from_token(api_key), "solver", api_base_url=base_url)
    messages = [ChatMessage.from_user(question)]
    messages += [*model.run(messages)["replies"], ChatMessage.from_user(AGAIN)]
    return model.run(messages)["replies"][0].text


def tools(question: str, base_url: str, api_key: str, kind=OpenAIChatGenerator, **options) -> str:
    model = kind(api_key=Secret.from_token(api_key), model="solver", api_base_url=base_url)
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(add)], **options)
    return agent.run([ChatMessage.from_user(question)])["last_message"].text


def stream(question: str, base_url: str, api_key: str) -> str:
    pieces = []
    tools(question, base_url, api_key, streaming_callback=lambda chunk: pieces.append(chunk.content))
    return "".join(pieces)


def responses(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, OpenAIResponsesChatGenerator)


def structured(question: str, base_url: str, api_key: str) -> str:
    options = {"response_format": Sum}
    model = OpenAIChatGenerator(Secret.from_token(api_key), "solver", api_base_url=base_url, generation_kwargs=options)
    return str(Sum.model_validate_json(model.run([ChatMessage.from_user(question)])["replies"][0].text).answer)
