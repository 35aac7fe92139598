"""pip install pydantic-ai-slim[openai]"""

from collections.abc import AsyncIterable

from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from sums import AGAIN, Sum, add


def agent(base_url: str, api_key: str, model=OpenAIChatModel, **options) -> Agent:
    return Agent(model("solver", provider=OpenAIProvider(base_url=base_url, api_key=api_key)), **options)


async def chat(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key)
    first = await solver.run(question)
    return (await solver.run(AGAIN, message_history=first.all_messages())).output


async def tools(question: str, base_url: str, api_key: str) -> str:
    return (await agent(base_url, api_key, tools=[add]).run(question)).output


async def stream(question: str, base_url: str, api_key: str) -> str:
    async def shown(context: RunContext, events: AsyncIterable) -> None:
        async for _ in events:
            pass

    return (await agent(base_url, api_key, tools=[add]).run(question, event_stream_handler=shown)).output


async def responses(question: str, base_url: str, api_key: str) -> str:
    return (await agent(base_url, api_key, OpenAIResponsesModel, tools=[add]).run(question)).output


async def structured(question: str, base_url: str, api_key: str) -> str:
    return str((await agent(base_url, api_key, output_type=NativeOutput(Sum)).run(question)).output.answer)
