"""pip install openai-agents"""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from sums import AGAIN, Sum, add

set_tracing_disabled(True)


def agent(base_url: str, api_key: str, model=OpenAIChatCompletionsModel, **options) -> Agent:
    return Agent("solver", model=model("solver", AsyncOpenAI(base_url=base_url, api_key=api_key)), **options)


async def chat(question: str, base_url: str, api_key: str) -> str:
    solver, session = agent(base_url, api_key), SQLiteSession("1")
    await Runner.run(solver, question, session=session)
    return (await Runner.run(solver, AGAIN, session=session)).final_output


async def tools(question: str, base_url: str, api_key: str) -> str:
    return (await Runner.run(agent(base_url, api_key, tools=[function_tool(add)]), question)).final_output


async def stream(question: str, base_url: str, api_key: str) -> str:
    result = Runner.run_streamed(agent(base_url, api_key, tools=[function_tool(add)]), question)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def responses(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key, OpenAIResponsesModel, tools=[function_tool(add)])
    return (await Runner.run(solver, question)).final_output


async def structured(question: str, base_url: str, api_key: str) -> str:
    return str((await Runner.run(agent(base_url, api_key, output_type=Sum), question)).final_output.answer)
