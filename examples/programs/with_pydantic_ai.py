"""An agent that another one calls as a tool, with Pydantic AI.

pip install "pydantic-ai-slim[openai]"
"""

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def solve(question: str, base_url: str, api_key: str) -> str:
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    checker = Agent(OpenAIChatModel("checker", provider=provider), instructions="Say the right answer.")
    solver = Agent(OpenAIChatModel("solver", provider=provider), instructions="Calculate.")

    @solver.tool
    async def check(context: RunContext[None], answer: str) -> str:
        """Ask a colleague about an answer."""
        result = await checker.run(f"{question} {answer}?", usage=context.usage)
        return result.output

    first = await solver.run(question)
    second = await solver.run("Are you sure? What is the answer?", message_history=first.all_messages())
    return second.output
