"""pip install strands-agents[openai]"""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from sums import AGAIN, Sum, add

SAYS = {"structured": ['<call>{"name": "Sum", "arguments": {"answer": 1234}}</call>']}


def agent(base_url: str, api_key: str, model=OpenAIModel, **options) -> Agent:
    client = {"base_url": base_url, "api_key": api_key}
    return Agent(model(client_args=client, model_id="solver"), callback_handler=None, **options)


def chat(question: str, base_url: str, api_key: str) -> str:
    solver = agent(base_url, api_key)
    solver(question)
    return str(solver(AGAIN))


async def stream(question: str, base_url: str, api_key: str) -> str:
    """Every request of its client streams."""
    events = agent(base_url, api_key, tools=[tool(add)]).stream_async(question)
    return "".join([event.get("data", "") async for event in events])


def tools(question: str, base_url: str, api_key: str) -> str:
    return str(agent(base_url, api_key, tools=[tool(add)])(question))


def responses(question: str, base_url: str, api_key: str) -> str:
    return str(agent(base_url, api_key, OpenAIResponsesModel, tools=[tool(add)])(question))


def structured(question: str, base_url: str, api_key: str) -> str:
    return str(agent(base_url, api_key)(question, structured_output_model=Sum).structured_output.answer)
