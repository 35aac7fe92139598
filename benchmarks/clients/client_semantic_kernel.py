"""pip install semantic-kernel"""

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function
from sums import AGAIN, Sum, add


class Tools:
    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: int, b: int) -> int:
        return add(a, b)


SAYS = {
    "tools": ['I add.<call>{"name": "Tools-add", "arguments": {"a": 1200, "b": 34}}</call>', "1234"],
    "stream": ['I add.<call>{"name": "Tools-add", "arguments": {"a": 1200, "b": 34}}</call>', "1234"],
    "responses": ['I add.<call>{"name": "Tools-add", "arguments": {"a": 1200, "b": 34}}</call>', "1234"],
}


def agent(base_url: str, api_key: str, **options) -> ChatCompletionAgent:
    service = OpenAIChatCompletion("solver", async_client=AsyncOpenAI(base_url=base_url, api_key=api_key))
    return ChatCompletionAgent(
        service=service, name="solver", function_choice_behavior=FunctionChoiceBehavior.Auto(), **options
    )


async def chat(question: str, base_url: str, api_key: str) -> str:
    solver, thread = agent(base_url, api_key), ChatHistoryAgentThread()
    await solver.get_response(question, thread=thread)
    return str(await solver.get_response(AGAIN, thread=thread))


async def tools(question: str, base_url: str, api_key: str) -> str:
    return str(await agent(base_url, api_key, plugins=[Tools()]).get_response(question))


async def stream(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key, plugins=[Tools()])
    return "".join([str(piece.content) async for piece in solver.invoke_stream(question)])


async def responses(question: str, base_url: str, api_key: str) -> str:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    solver = OpenAIResponsesAgent(
        ai_model_id="solver",
        client=client,
        name="solver",
        plugins=[Tools()],
        store_enabled=False,
        function_choice_behavior=FunctionChoiceBehavior.Auto(),
    )
    return str(await solver.get_response(question))


async def structured(question: str, base_url: str, api_key: str) -> str:
    settings = OpenAIChatPromptExecutionSettings(response_format=Sum)
    said = await agent(base_url, api_key, arguments=KernelArguments(settings)).get_response(question)
    return str(Sum.model_validate_json(str(said)).answer)
