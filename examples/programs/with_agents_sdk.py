"""A handoff with the OpenAI Agents SDK: a solver may hand the conversation over to a checker, or use a tool.

pip install openai-agents
"""

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def solve(question: str, base_url: str, api_key: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        checker = Agent(
            name="checker",
            instructions="Say the right answer.",
            model=OpenAIResponsesModel("checker", client),
        )
        solver = Agent(
            name="solver",
            instructions="Calculate, or hand over.",
            model=OpenAIResponsesModel("solver", client),
            tools=[add],
            handoffs=[checker],
        )
        result = await Runner.run(solver, question, run_config=RunConfig(tracing_disabled=True))
        first = result.final_output
        again = [*result.to_input_list(), {"role": "user", "content": "Are you sure? What is the answer?"}]
        result = await Runner.run(solver, again, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output or first)
