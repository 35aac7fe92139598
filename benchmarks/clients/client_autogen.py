"""pip install autogen-agentchat autogen-ext[openai]"""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from sums import AGAIN, Sum, add

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


def agent(base_url: str, api_key: str, **options) -> AssistantAgent:
    client = OpenAIChatCompletionClient(model="solver", base_url=base_url, api_key=api_key, model_info=INFO)
    return AssistantAgent("solver", client, system_message="Calculate.", **options)


async def chat(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key)
    await solver.run(task=question)
    return (await solver.run(task=AGAIN)).messages[-1].content


async def tools(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key, tools=[add], reflect_on_tool_use=True)
    return (await solver.run(task=question)).messages[-1].content


async def stream(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key, tools=[add], reflect_on_tool_use=True, model_client_stream=True)
    said = [event async for event in solver.run_stream(task=question)]
    return [event.content for event in said if isinstance(event, TextMessage)][-1]


async def structured(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key, output_content_type=Sum)
    return str((await solver.run(task=question)).messages[-1].content.answer)
