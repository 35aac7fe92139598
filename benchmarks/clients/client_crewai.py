"""pip install crewai"""

import os

os.environ |= {"CREWAI_TRACING_ENABLED": "false", "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from sums import AGAIN, Sum, add


def crew(texts: list[str], base_url: str, api_key: str, tools=(), kind=None, **options):
    model = LLM("openai/solver", base_url=base_url, api_key=api_key, **options)
    solver = Agent(role="Solver", goal="Calculate.", backstory="You are good at it.", llm=model, tools=list(tools))
    tasks = [Task(description=text, expected_output="A number.", agent=solver, output_pydantic=kind) for text in texts]
    return Crew(agents=[solver], tasks=tasks).kickoff()


def chat(question: str, base_url: str, api_key: str) -> str:
    return crew([question, AGAIN], base_url, api_key).raw


def tools(question: str, base_url: str, api_key: str) -> str:
    return crew([question], base_url, api_key, [tool("add")(add)]).raw


def stream(question: str, base_url: str, api_key: str) -> str:
    return crew([question], base_url, api_key, [tool("add")(add)], stream=True).raw


def structured(question: str, base_url: str, api_key: str) -> str:
    return str(crew([question], base_url, api_key, kind=Sum).pydantic.answer)
