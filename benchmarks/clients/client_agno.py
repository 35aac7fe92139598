"""pip install agno openai"""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAILike, OpenAIResponses
from sums import AGAIN, Sum, add


def chat(question: str, base_url: str, api_key: str) -> str:
    model = OpenAILike(id="solver", base_url=base_url, api_key=api_key)
    agent = Agent(model=model, db=InMemoryDb(), add_history_to_context=True, telemetry=False)
    agent.run(question, session_id="1")
    return agent.run(AGAIN, session_id="1").content


def tools(question: str, base_url: str, api_key: str) -> str:
    model = OpenAILike(id="solver", base_url=base_url, api_key=api_key)
    return Agent(model=model, tools=[add], telemetry=False).run(question).content


def stream(question: str, base_url: str, api_key: str) -> str:
    model = OpenAILike(id="solver", base_url=base_url, api_key=api_key)
    events = Agent(model=model, tools=[add], telemetry=False).run(question, stream=True)
    return [event.content for event in events if event.event == "RunContent"][-1]


def responses(question: str, base_url: str, api_key: str) -> str:
    model = OpenAIResponses(id="solver", base_url=base_url, api_key=api_key)
    return Agent(model=model, tools=[add], telemetry=False).run(question).content


def structured(question: str, base_url: str, api_key: str) -> str:
    model = OpenAILike(id="solver", base_url=base_url, api_key=api_key)
    return str(Agent(model=model, output_schema=Sum, telemetry=False).run(question).content.answer)
