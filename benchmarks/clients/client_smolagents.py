"""pip install smolagents[openai]"""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from sums import AGAIN, add

SAYS = {
    "chat": ["<code>final_answer(4)</code>", "<code>final_answer(1234)</code>"],
    "tools": [
        'I add.<call>{"name": "add", "arguments": {"a": 1200, "b": 34}}</call>',
        '<call>{"name": "final_answer", "arguments": {"answer": "1234"}}</call>',
    ],
    "stream": [
        'I add.<call>{"name": "add", "arguments": {"a": 1200, "b": 34}}</call>',
        '<call>{"name": "final_answer", "arguments": {"answer": "1234"}}</call>',
    ],
}


def chat(question: str, base_url: str, api_key: str) -> str:
    solver = CodeAgent([], OpenAIModel("solver", base_url, api_key=api_key), verbosity_level=0)
    solver.run(question)
    return str(solver.run(AGAIN, reset=False))


def tools(question: str, base_url: str, api_key: str, **options) -> str:
    model = OpenAIModel("solver", base_url, api_key=api_key)
    return str(ToolCallingAgent([tool(add)], model, verbosity_level=0, **options).run(question))


def stream(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, stream_outputs=True)
